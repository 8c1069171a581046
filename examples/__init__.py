"""The demonstration: `python -m examples.demo`."""

import os

# The weights come from an installed package, so nothing may be looked up on a model hub.
# transformers reads this when it is imported, hence here.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
