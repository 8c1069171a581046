"""Lowered operators on the samples of PyTorch's own operator tests (``op_db``).

Both tables hold entries of ``op_db`` that run without eager fallback. ``NAMES`` is enough of them
to reach every lowered operator that any entry reaches; ``MORE`` are the others, which pass through
the same lowerings. Entries whose values are random or unspecified are left out.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from .compare import check

pytest.importorskip("expecttest", reason="torch.testing._internal needs it")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*degrees of freedom"),
    pytest.mark.filterwarnings("ignore:index_reduce.. is in beta"),
]

#: Samples an entry and dtype, and elements in all tensors of a sample.
SAMPLES, LARGEST = 2, 20_000


@functools.cache
def entries() -> dict[str, Any]:
    """The entries of ``op_db`` by name and variant."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {
        op.name + (f".{op.variant_test_name}" if op.variant_test_name else ""): op for op in op_db
    }


def size(tree: Any) -> int:
    """Elements of all tensors."""
    leaves = pytree.tree_leaves(tree)
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))


def samples(op: Any, dtype: torch.dtype, count: int, grad: bool) -> list[tuple[Any, ...]]:
    """``count`` samples from the first to the last of the moderate ones."""
    torch.manual_seed(0)
    made = itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=grad), 60)
    found = [(sample.input, sample.args, sample.kwargs) for sample in made]
    found = [sample for sample in found if size(sample) < LARGEST]
    if len(found) <= count:
        return found
    last = len(found) - 1
    return [found[last * i // max(count - 1, 1)] for i in range(count)] if count > 1 else found[-1:]


def run(name: str) -> None:
    """Compare an entry's samples with eager: float32, its gradients, and int64."""
    op = entries()[name]
    supported = op.supported_dtypes("cpu")
    grad = bool(op.supports_autograd)

    def call(x: Any, args: Any, kwargs: Any) -> Any:
        return op.op(x, *args, **kwargs)

    compared = 0
    for dtype, count, differentiate in (
        (torch.float32, 1 if grad else SAMPLES, False),
        (torch.float32, 1, grad),
        (torch.int64, 1, False),
    ):
        if dtype not in supported or (dtype, differentiate, count) == (torch.float32, False, 0):
            continue
        for sample in samples(op, dtype, count, differentiate):
            check(call, *sample, grad=differentiate, scale=4)
            compared += 1
    assert compared


NAMES = """
__getitem__ __rsub__ _native_batch_norm_legit _softmax_backward_data
_unsafe_masked_index_put_accumulate abs acos acosh add addcdiv addcmul addmm alias_copy all amax
amin angle any arange argmax argmin as_strided asin asinh atan atan2 atanh baddbmm bitwise_and
bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor bmm bucketize cat ceil
clamp clamp_max clamp_min clone constant_pad_nd copysign cos cosh cummax cummin cumprod cumsum
diagonal_scatter diff dot eq erf erfc erfinv exp exp2 expand expm1 eye fft.fft fft.irfft fill
flip floor floor_divide fmax fmin fmod frexp full full_like gather gcd ge gt heaviside hypot i0
igamma igammac index_add index_reduce.amax index_select isinf isnan kron lcm ldexp le lerp
lgamma linalg.diagonal linspace log log10 log1p log2 log_softmax logical_and logical_not
logical_or logical_xor logsumexp lt masked_fill max.reduction_no_dim
max_pool2d_with_indices_backward maximum mean median min.reduction_no_dim min.reduction_with_dim
minimum mm mul mv nanmedian native_batch_norm native_group_norm native_layer_norm ne neg
new_full new_ones new_zeros nextafter nn.functional.adaptive_avg_pool2d
nn.functional.adaptive_avg_pool3d nn.functional.adaptive_max_pool2d
nn.functional.adaptive_max_pool3d nn.functional.avg_pool2d nn.functional.avg_pool3d
nn.functional.conv_transpose2d nn.functional.cross_entropy nn.functional.elu nn.functional.gelu
nn.functional.hardtanh nn.functional.leaky_relu nn.functional.margin_ranking_loss
nn.functional.max_pool3d nn.functional.max_unpool3d.grad nn.functional.mish
nn.functional.pad.circular nn.functional.pad.replicate nn.functional.pad.replicate_negative
nn.functional.relu nn.functional.silu nn.functional.softplus ones ones_like permute pow prod put
reciprocal remainder repeat roll round round.decimals_neg_3 rsqrt scalar_tensor scatter
scatter_add scatter_reduce.sum searchsorted select select_scatter sigmoid sign
signal.windows.general_cosine signbit sin sinh slice slice_scatter softmax sort special.i0e
special.ndtri split split_with_sizes sqrt squeeze squeeze.multiple stack std sub sum t
take_along_dim tan tanh transpose tril tril_indices triu triu_indices trunc unbind unfold
unsqueeze var var_mean view view_as_complex where zeros zeros_like
"""

MORE = """
H T __radd__ __rdiv__ __rmatmul__ __rmod__ __rmul__ __ror__ __rpow__ __rxor__ _chunk_cat
_unsafe_masked_index addmm.decomposed addmv addr aminmax argsort atleast_1d atleast_2d
atleast_3d bfloat16 block_diag bmm.triton_optimized bool broadcast_shapes broadcast_tensors
broadcast_to byte cartesian_prod cdouble cfloat char chunk column_stack conj conj_physical
contiguous count_nonzero cross cumulative_trapezoid deg2rad diag diag_embed diagflat diagonal
diagonal_copy div.floor_rounding div.trunc_rounding double dsplit dstack einsum expand_as
expand_copy fft.fft2 fft.fftn fft.fftshift fft.ifft2 fft.ifftn fft.ifftshift fft.irfft2
fft.irfftn fft.rfft fft.rfft2 fft.rfftn flatten fliplr flipud float float_power frac gradient
half hsplit hstack index_copy index_reduce.amin index_reduce.mean index_reduce.prod inner int
isclose isfinite isin isneginf isposinf isreal linalg.cross linalg.multi_dot linalg.norm
linalg.norm.subgradients_at_zero linalg.vander linalg.vecdot linalg.vector_norm
linspace.tensor_overload log_softmax.with_dtype logaddexp logaddexp2 logit logspace
logspace.tensor_overload long mH mT masked.amax masked.amin masked.argmax masked.argmin
masked.cumprod masked.cumsum masked.log_softmax masked.logaddexp masked.logsumexp masked.mean
masked.median masked.norm masked.prod masked.softmax masked.softmin masked.std masked.sum
masked.var matmul max.binary max.reduction_with_dim meshgrid.list_of_tensors
meshgrid.variadic_tensors min.binary movedim msort mvlgamma.mvlgamma_p_1 mvlgamma.mvlgamma_p_3
mvlgamma.mvlgamma_p_5 nan_to_num nanmean nanquantile nansum nn.functional.adaptive_avg_pool1d
nn.functional.adaptive_max_pool1d nn.functional.avg_pool1d nn.functional.batch_norm
nn.functional.binary_cross_entropy nn.functional.binary_cross_entropy_with_logits
nn.functional.celu nn.functional.channel_shuffle nn.functional.conv1d nn.functional.conv2d
nn.functional.conv3d nn.functional.conv_transpose1d nn.functional.conv_transpose3d
nn.functional.cosine_embedding_loss nn.functional.cosine_similarity nn.functional.glu
nn.functional.group_norm nn.functional.hardshrink nn.functional.hardsigmoid
nn.functional.hardswish nn.functional.hinge_embedding_loss nn.functional.huber_loss
nn.functional.instance_norm nn.functional.interpolate.area nn.functional.interpolate.bicubic
nn.functional.interpolate.bilinear nn.functional.interpolate.linear
nn.functional.interpolate.nearest nn.functional.interpolate.nearest-exact
nn.functional.interpolate.trilinear nn.functional.kl_div nn.functional.l1_loss
nn.functional.layer_norm nn.functional.linear nn.functional.linear_cross_entropy
nn.functional.local_response_norm nn.functional.logsigmoid nn.functional.max_pool1d
nn.functional.max_pool2d nn.functional.max_unpool1d nn.functional.max_unpool1d.grad
nn.functional.max_unpool3d nn.functional.mse_loss nn.functional.multi_margin_loss
nn.functional.multilabel_margin_loss nn.functional.multilabel_soft_margin_loss
nn.functional.nll_loss nn.functional.pad.constant nn.functional.pad.reflect
nn.functional.pairwise_distance nn.functional.pixel_shuffle nn.functional.pixel_unshuffle
nn.functional.prelu nn.functional.relu6 nn.functional.rms_norm nn.functional.selu
nn.functional.smooth_l1_loss nn.functional.soft_margin_loss nn.functional.softmin
nn.functional.softmin.with_dtype nn.functional.softshrink nn.functional.softsign
nn.functional.tanhshrink nn.functional.threshold nn.functional.triplet_margin_loss
nn.functional.triplet_margin_with_distance_loss nn.functional.unfold norm norm.fro norm.inf
outer positive quantile rad2deg ravel real renorm reshape reshape_as resolve_conj resolve_neg
rot90 round.decimals_0 round.decimals_3 rsub scatter_reduce.amax scatter_reduce.amin
scatter_reduce.mean scatter_reduce.prod short signal.windows.bartlett signal.windows.blackman
signal.windows.cosine signal.windows.gaussian signal.windows.general_hamming
signal.windows.hamming signal.windows.hann signal.windows.kaiser signal.windows.nuttall sinc
softmax.with_dtype special.entr special.i1 special.i1e special.ndtr special.xlog1py
split.list_args split_with_sizes_copy square squeeze_copy std.unbiased std_mean
std_mean.unbiased stft sum_to_size t_copy take tensor_split tensordot tile to
torch.ops.aten._safe_softmax.default trace transpose_copy trapezoid trapz true_divide unflatten
unfold_copy unsafe_chunk unsafe_split unsqueeze_copy var.unbiased var_mean.unbiased vdot view_as
vsplit vstack xlogy zero_
"""


@pytest.mark.parametrize("name", NAMES.split())
def test_values(name: str) -> None:
    run(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE.split())
def test_values_of_more(name: str) -> None:
    run(name)
