"""Sentences for the semantic search, from prose that ships with Python and scikit-learn."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Iterable, Iterator
from pydoc_data.topics import topics

# Directives, field lists, bullets, tables, indented code, addresses: anything but prose.
_NOT_PROSE = re.compile(r"\s*(\.\. |:|[-*|=~>#]|\d+\.)|\s{2,}|.*https?:|.*@")
_SENTENCE_END = re.compile(r"(?<=[a-z0-9)\"`][.!?])\s+(?=[A-Z])")
_WORDS = range(8, 41)


def load_sentences(limit: int) -> list[str]:
    """Return at most `limit` different sentences.

    scikit-learn's descriptions of its data sets come first, as many as there are; the
    Python language reference, as pydoc carries it, fills the rest evenly from end to end.
    """
    datasets = _unique(_sentences(_dataset_descriptions()))[:limit]
    reference = [s for s in _unique(_sentences(topics.values())) if not s.startswith("See ")]
    wanted = min(limit - len(datasets), len(reference))
    return datasets + [reference[i * len(reference) // wanted] for i in range(wanted)]


def _dataset_descriptions() -> list[str]:
    folder = importlib.resources.files("sklearn.datasets") / "descr"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".rst")), key=lambda f: f.name)
    return [file.read_text(encoding="utf-8") for file in files]


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for paragraph in re.split(r"\n\s*\n", text):
            yield from _paragraph_sentences(paragraph)


def _paragraph_sentences(paragraph: str) -> Iterator[str]:
    lines = paragraph.splitlines()
    if any(_NOT_PROSE.match(line) for line in lines):
        return
    for sentence in _SENTENCE_END.split(" ".join(line.strip() for line in lines)):
        if len(sentence.split()) in _WORDS and sentence[0].isupper() and sentence[-1] in ".!?":
            yield sentence


def _unique(sentences: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(sentences))
