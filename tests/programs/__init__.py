"""Random PyTorch programs, drawn by hypothesis, compiled and compared with eager."""
