"""neuron-compile."""
