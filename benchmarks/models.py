"""Eight architectures with random float32 weights, each in a benchmark and a small size."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.architecture import (
    ALL_MODES,
    Architecture,
    next_token,
    normal,
    padded_tokens,
    ramp_square,
    seeded,
    tokens,
)

# --------------------------------------------------------------------------- plain nn models


class MLP(nn.Module):
    """Linear layers with GELU between them: (batch, widths[0]) -> (batch, widths[-1])."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(fan_in, fan_out) for fan_in, fan_out in itertools.pairwise(widths)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.gelu(layer(x))
        return self.layers[-1](x)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch normalisation around a (projected) shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False),
                nn.BatchNorm2d(channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """The 18-layer residual network: (batch, 3, height, width) -> (batch, classes)."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        blocks: list[nn.Module] = []
        channels_in = width
        for stage in range(4):
            channels = width * 2**stage
            blocks.append(BasicBlock(channels_in, channels, stride=1 if stage == 0 else 2))
            blocks.append(BasicBlock(channels, channels, stride=1))
            channels_in = channels
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels_in, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class ChannelsLastNorm(nn.Module):
    """Layer normalisation over the channel dimension of an NCHW tensor."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """Depthwise 7x7 convolution, then a channels-last MLP scaled per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.expand = nn.Linear(channels, 4 * channels)
        self.project = nn.Linear(4 * channels, channels)
        # The paper starts layer scale at 1e-6, for which an untrained block adds nothing that
        # a numerical check could see.
        self.scale = nn.Parameter(torch.full((channels,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.project(F.gelu(self.expand(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """A ConvNeXt-like network: (batch, 3, height, width) -> (batch, classes)."""

    def __init__(self, widths: tuple[int, ...], depths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        stages: list[nn.Module] = [
            nn.Conv2d(3, widths[0], 4, stride=4),
            ChannelsLastNorm(widths[0]),
        ]
        for stage, (channels, depth) in enumerate(zip(widths, depths, strict=True)):
            if stage > 0:
                stages.append(ChannelsLastNorm(widths[stage - 1]))
                stages.append(nn.Conv2d(widths[stage - 1], channels, 2, stride=2))
            stages.extend(ConvNeXtBlock(channels) for _ in range(depth))
        self.stages = nn.Sequential(*stages)
        self.norm = nn.LayerNorm(widths[-1], eps=1e-6)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.stages(x).mean((-2, -1))))


# ------------------------------------------------------------------------ transformers models


class Output(nn.Module):
    """Makes a transformers model return one plain tensor: the named field of its output."""

    def __init__(self, model: nn.Module, field: str) -> None:
        super().__init__()
        self.model = model
        self.field = field

    def forward(self, **inputs: Tensor) -> Tensor:
        return getattr(self.model(**inputs), self.field)


def _bert(hidden: int, layers: int, heads: int, vocabulary: int) -> nn.Module:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        max_position_embeddings=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return Output(BertModel(config, add_pooling_layer=False), "last_hidden_state")


def gpt2(hidden: int, layers: int, heads: int, vocabulary: int) -> nn.Module:
    """GPT-2 with 128 positions and no dropout, as a module that returns its logits."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=128,
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return Output(GPT2LMHeadModel(config), "logits")


def llama_config(
    hidden: int, layers: int, heads: int, vocabulary: int, positions: int, **more: Any
) -> Any:
    """A Llama with grouped queries: two heads for each of keys and values."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=8 * hidden // 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=positions,
        **more,
    )


def _llama(hidden: int, layers: int, heads: int, vocabulary: int) -> nn.Module:
    from transformers import LlamaForCausalLM

    config = llama_config(hidden, layers, heads, vocabulary, 128, use_cache=False)
    return Output(LlamaForCausalLM(config), "logits")


def _vit(
    hidden: int, layers: int, heads: int, *, image: int, patch: int, classes: int
) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=image,
        patch_size=patch,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=classes,  # type: ignore[call-arg]  # of the base
    )
    return Output(ViTForImageClassification(config), "logits")


def _t5(hidden: int, layers: int, heads: int, vocabulary: int) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=vocabulary,
        d_model=hidden,
        d_kv=hidden // heads,
        d_ff=8 * hidden // 3,
        num_layers=layers,
        num_decoder_layers=layers,
        num_heads=heads,
        dropout_rate=0.0,
        decoder_start_token_id=0,  # type: ignore[call-arg]  # of the base
        use_cache=False,
    )
    return Output(T5ForConditionalGeneration(config), "logits")


# ----------------------------------------------------------------------------------- registry


def _full_size() -> list[Architecture]:
    """Sizes whose eager inference call takes some 10 to 60 ms on two CPU cores."""
    vocabulary = 8000
    return [
        Architecture(
            "mlp",
            seeded(lambda: MLP((1024, 2048, 2048, 2048, 512))),
            normal("x", 128, 1024),
            ramp_square,
            ALL_MODES,
        ),
        Architecture(
            "resnet18",
            seeded(lambda: ResNet18(width=64, classes=1000)),
            normal("x", 4, 3, 112, 112),
            ramp_square,
        ),
        Architecture(
            "convnext",
            seeded(lambda: ConvNeXt((64, 128, 256, 512), (2, 2, 4, 2), classes=1000)),
            normal("x", 4, 3, 112, 112),
            ramp_square,
        ),
        Architecture(
            "bert",
            seeded(lambda: _bert(384, 4, 6, vocabulary)),
            padded_tokens(vocabulary, 4, 128),
            ramp_square,
            ALL_MODES,
        ),
        Architecture(
            "gpt2",
            seeded(lambda: gpt2(384, 4, 6, vocabulary)),
            tokens(vocabulary, input_ids=(2, 128)),
            next_token("input_ids"),
        ),
        Architecture(
            "llama",
            seeded(lambda: _llama(384, 4, 6, vocabulary)),
            tokens(vocabulary, input_ids=(2, 128)),
            next_token("input_ids"),
        ),
        Architecture(
            "vit",
            seeded(lambda: _vit(384, 4, 6, image=128, patch=16, classes=1000)),
            normal("pixel_values", 4, 3, 128, 128),
            ramp_square,
        ),
        Architecture(
            "t5",
            seeded(lambda: _t5(384, 2, 6, vocabulary)),
            tokens(vocabulary, input_ids=(4, 64), decoder_input_ids=(4, 48)),
            next_token("decoder_input_ids"),
        ),
    ]


def _small_size() -> list[Architecture]:
    """The same architectures in sizes for tests: an eager inference call stays below 5 ms."""
    vocabulary = 100
    return [
        Architecture(
            "mlp",
            seeded(lambda: MLP((16, 32, 32, 8))),
            normal("x", 4, 16),
            ramp_square,
            ALL_MODES,
        ),
        Architecture(
            "resnet18",
            seeded(lambda: ResNet18(width=8, classes=10)),
            # Batch normalisation over fewer values in the last stage would be ill-conditioned.
            normal("x", 4, 3, 48, 48),
            ramp_square,
        ),
        Architecture(
            "convnext",
            seeded(lambda: ConvNeXt((8, 16), (1, 1), classes=10)),
            normal("x", 2, 3, 32, 32),
            ramp_square,
        ),
        Architecture(
            "bert",
            seeded(lambda: _bert(32, 2, 4, vocabulary)),
            padded_tokens(vocabulary, 2, 16),
            ramp_square,
            ALL_MODES,
        ),
        Architecture(
            "gpt2",
            seeded(lambda: gpt2(32, 2, 4, vocabulary)),
            tokens(vocabulary, input_ids=(2, 12)),
            next_token("input_ids"),
        ),
        Architecture(
            "llama",
            seeded(lambda: _llama(48, 2, 4, vocabulary)),
            tokens(vocabulary, input_ids=(2, 12)),
            next_token("input_ids"),
        ),
        Architecture(
            "vit",
            seeded(lambda: _vit(32, 2, 4, image=16, patch=4, classes=10)),
            normal("pixel_values", 2, 3, 16, 16),
            ramp_square,
        ),
        Architecture(
            "t5",
            seeded(lambda: _t5(48, 2, 4, vocabulary)),
            tokens(vocabulary, input_ids=(2, 12), decoder_input_ids=(2, 8)),
            next_token("decoder_input_ids"),
        ),
    ]


def architectures(small: bool = False) -> dict[str, Architecture]:
    """The architectures by name, in the order in which they are reported."""
    members = _small_size() if small else _full_size()
    return {member.name: member for member in members}
