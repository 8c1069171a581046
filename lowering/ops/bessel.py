"""Bessel and Airy functions.

The approximations and their coefficients are those of S. L. Moshier's Cephes library (``j0.c``,
``j1.c``, ``k0.c``, ``k1.c``, ``airy.c``), evaluated as ATen does (``ATen/native/Math.h``): where
Cephes' ``p1evl`` implies a leading one, ATen has none, and its values are the ones to give.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..lazy_jax import jnp, special, special_functions
from ..registry import lowers
from ._polynomials import chebyshev, polynomial
from ._shared import cast, pointwise

aten = torch.ops.aten

# fmt: off
# Rational approximations: J and Y up to 5, and modulus and phase beyond.
_PP0 = (
    0.0007969367292973471, 0.08283523921074408, 1.239533716464143, 5.447250030587687,
    8.74716500199817, 5.303240382353949, 1.0,
)
_PQ0 = (
    0.0009244088105588637, 0.08562884743544745, 1.2535274390105895, 5.470977403304171,
    8.761908832370695, 5.306052882353947, 1.0,
)
_QP0 = (
    -0.011366383889846916, -1.2825271867050931, -19.553954425773597, -93.20601521237683,
    -177.68116798048806, -147.07750515495118, -51.41053267665993, -6.050143506007285,
)
_QQ0 = (
    64.3178256118178, 856.4300259769806, 3882.4018360540163, 7240.467741956525, 5930.727011873169,
    2062.0933166032783, 242.0057402402914,
)
_RP0 = (
    -4794432209.782018, 1956174919465.5657, -249248344360967.72, 9708622510473064.0,
)
_RQ0 = (
    499.563147152651, 173785.4016763747, 48440965.83399621, 11185553704.535683, 2112775201154.892,
    310518229857422.56, 3.1812195594320496e+16, 1.7108629408104315e+18,
)
_YP0 = (
    15592.436785523574, -14663929.59039716, 5435264770.518765, -982136065717.9115, 87590639439536.7,
    -3466283033847297.0, 4.4273326857256984e+16, -1.8495080043698668e+16,
)
_YQ0 = (
    1041.2835366425984, 626107.330137135, 268919633.39381415, 86400248710.3935, 20297961275010.555,
    3171577528429750.5, 2.5059625617265306e+17,
)
_PP1 = (
    0.0007621256162081731, 0.07313970569409176, 1.1271960812968493, 5.112079511468076,
    8.424045901417724, 5.214515986823615, 1.0,
)
_PQ1 = (
    0.0005713231280725487, 0.06884559087544954, 1.105142326340617, 5.073863861286015,
    8.399855543276042, 5.209828486823619, 1.0,
)
_QP1 = (
    0.05108625947501766, 4.982138729512334, 75.82382841325453, 366.7796093601508, 710.8563049989261,
    597.4896124006136, 211.68875710057213, 25.207020585802372,
)
_QQ1 = (
    74.23732770356752, 1056.4488603826283, 4986.410583376536, 9562.318924047562, 7997.041604473507,
    2826.1927851763908, 336.0936078106983,
)
_RP1 = (
    -899971225.7055594, 452228297998.19403, -72749424522181.83, 3682957328638529.0,
)
_RQ1 = (
    620.8364781180543, 256987.25675774884, 83514679.14319493, 22151159547.97925, 4749141220799.914,
    784369607876235.9, 8.952223361846274e+16, 5.322786203326801e+18,
)
_YP1 = (
    1263204747.9017804, -647355876379.1603, 114509511541823.73, -8127702555013251.0,
    2.024394757135949e+17, -7.788771962659501e+17,
)
_YQ1 = (
    594.3015923461282, 235564.09294306856, 73481194.44597217, 18760131610.870617,
    3882312774962.3857, 620557727146953.8, 6.871410873553005e+16, 3.9727060811656064e+18,
)

# Chebyshev expansions of K up to 2 (A) and beyond (B).
_K0A = (
    1.374465435613523e-16, 4.25981614279661e-14, 1.0349695257633842e-11, 1.904516377220209e-09,
    2.5347910790261494e-07, 2.286212103119452e-05, 0.001264615411446926, 0.0359799365153615,
    0.3442898999246285, -0.5353273932339028,
)
_K0B = (
    5.300433772686263e-18, -1.6475804301524212e-17, 5.2103915050390274e-17, -1.678231096805412e-16,
    5.512055978524319e-16, -1.848593377343779e-15, 6.3400764774050706e-15, -2.2275133269916698e-14,
    8.032890775363575e-14, -2.9800969231727303e-13, 1.140340588208475e-12, -4.514597883373944e-12,
    1.8559491149547177e-11, -7.957489244477107e-11, 3.577397281400301e-10, -1.69753450938906e-09,
    8.574034017414225e-09, -4.660489897687948e-08, 2.766813639445015e-07, -1.8317555227191195e-06,
    1.39498137188765e-05, -0.00012849549581627802, 0.0015698838857300533, -0.0314481013119645,
    2.4403030820659555,
)
_K1A = (
    -7.023863479386288e-18, -2.427449850519366e-15, -6.666901694199329e-13, -1.4114883926335278e-10,
    -2.213387630734726e-08, -2.4334061415659684e-06, -0.0001730288957513052, -0.006975723859639864,
    -0.12261118082265715, -0.3531559607765449, 1.5253002273389478,
)
_K1B = (
    -5.756744483665017e-18, 1.7940508731475592e-17, -5.689462558442859e-17, 1.838093544366639e-16,
    -6.057047248373319e-16, 2.038703165624334e-15, -7.019837090418314e-15, 2.4771544244813043e-14,
    -8.976705182324994e-14, 3.3484196660784293e-13, -1.2891739609510289e-12, 5.13963967348173e-12,
    -2.1299678384275683e-11, 9.218315187605006e-11, -4.1903547593418965e-10, 2.015049755197033e-09,
    -1.0345762465678097e-08, 5.7410841254500495e-08, -3.5019606030878126e-07, 2.406484947837217e-06,
    -1.936197974166083e-05, 0.00019521551847135162, -0.002857816859622779, 0.10392373657681724,
    2.7206261904844427,
)

# Rational approximations of Ai: beyond 2.09 (A), and below -2.09 (AF and AG).
_AN = (
    0.346538101525629, 12.007595273964581, 76.27960536152345, 168.08922493463058,
    159.75639135016442, 70.53609068404442, 14.026469116338967, 1.0,
)
_AD = (
    0.5675945326387702, 14.75625625848472, 84.51389701414746, 177.31808814540045, 164.2346928715297,
    71.47784008255756, 14.095913560783403, 1.0,
)
_AFN = (
    -0.1316963234183318, -0.6264565444319123, -0.6931580360369335, -0.2797799815451191,
    -0.04919001326095003, -0.004062659235948854, -0.0001592764962392621, -2.776491081552329e-06,
    -1.6778769848911465e-08,
)
_AFD = (
    13.356042070655324, 32.682503279522464, 26.736704094149957, 9.187074029072596,
    1.4752914677166642, 0.11568717379518804, 0.004402916416152112, 7.547203482874142e-05,
    4.5185009297058035e-07,
)
_AGN = (
    0.01973399320916857, 0.39110302961568827, 1.0657989759959559, 0.9391692298166502,
    0.35146565610554764, 0.06338889196289255, 0.005858041130483885, 0.000282851600836737,
    6.98793669997261e-06, 8.117892395543892e-08, 3.415517847659236e-10,
)
_AGD = (
    9.30892908077442, 19.835292871831214, 15.564662893286462, 5.476860694229755, 0.9542936116189619,
    0.08645808263523921, 0.004126565238242226, 0.00010125908511650914, 1.1716673321441352e-06,
    4.9183457006293e-09,
)
# fmt: on


def _ratio(x: Any, numerator: tuple[float, ...], denominator: tuple[float, ...]) -> Any:
    return polynomial(x, numerator) / polynomial(x, denominator)


def _waves(x: Any, order: int) -> tuple[Any, Any]:
    """J and Y of a positive argument beyond 5, by modulus and phase."""
    z = 25.0 / (x * x) if order == 0 else (5.0 / x) * (5.0 / x)
    tables = (_PP0, _PQ0, _QP0, _QQ0) if order == 0 else (_PP1, _PQ1, _QP1, _QQ1)
    p, q = _ratio(z, *tables[:2]), 5.0 / x * _ratio(z, *tables[2:])
    phase = x - jnp.asarray((0.25 + 0.5 * order) * math.pi, x.dtype)
    cosine, sine = jnp.cos(phase), jnp.sin(phase)
    scale = math.sqrt(2 / math.pi)
    root = jnp.sqrt(x)
    return (p * cosine - q * sine) * scale / root, (p * sine + q * cosine) * scale / root


def _j0(x: Any) -> Any:
    x = jnp.abs(x)
    square = x * x
    near = (square - 5.78318596294678452118) * (square - 30.4712623436620863991)
    near = jnp.where(x < 1e-5, 1 - square / 4, near * _ratio(square, _RP0, _RQ0))
    return jnp.where(x <= 5, near, _waves(x, 0)[0])


def _j1(x: Any) -> Any:
    size = jnp.abs(x)
    square = size * size
    near = _ratio(square, _RP1, _RQ1) * size
    near = near * (square - 14.6819706421238932572) * (square - 49.2184563216946036703)
    value = jnp.where(size <= 5, near, _waves(size, 1)[0])
    return jnp.where(x < 0, -value, value)


def _at_zero(x: Any, value: Any, pole: float) -> Any:
    """``value`` with a pole at zero and NaN below."""
    return jnp.where(x == 0, pole, jnp.where(x < 0, jnp.nan, value))


def _y0(x: Any) -> Any:
    near = _ratio(x * x, _YP0, _YQ0) + (2 / math.pi) * jnp.log(x) * _j0(x)
    return _at_zero(x, jnp.where(x <= 5, near, _waves(x, 0)[1]), -jnp.inf)


def _y1(x: Any) -> Any:
    near = x * _ratio(x * x, _YP1, _YQ1) + (2 / math.pi) * (_j1(x) * jnp.log(x) - 1 / x)
    return _at_zero(x, jnp.where(x <= 5, near, _waves(x, 1)[1]), -jnp.inf)


def _scaled(x: Any, near: Any, table: tuple[float, ...], factor: Any) -> Any:
    """K times ``exp(x)``, or K itself: ``near`` up to 2 is K, the expansion beyond is scaled."""
    up, down = (jnp.exp(x), 1) if factor else (1, jnp.exp(-x))
    far = down * chebyshev(8 / x - 2, table) / jnp.sqrt(x)
    return _at_zero(x, jnp.where(x <= 2, near * up, far), jnp.inf)


def _k0(x: Any, scaled: bool = False) -> Any:
    near = chebyshev(x * x - 2, _K0A) - jnp.log(0.5 * x) * special.i0(x)
    return _scaled(x, near, _K0B, scaled)


def _k1(x: Any, scaled: bool = False) -> Any:
    near = jnp.log(0.5 * x) * special.i1(x) + chebyshev(x * x - 2, _K1A) / x
    return _scaled(x, near, _K1B, scaled)


def _spherical_j0(x: Any) -> Any:
    series = [(-1) ** k / math.factorial(2 * k + 1) for k in range(6, -1, -1)]
    near = polynomial(x * x, series)
    return jnp.where(jnp.isinf(x), 0, jnp.where(jnp.abs(x) < 0.5, near, jnp.sin(x) / x))


def _maclaurin(first: int, terms: int = 16) -> list[float]:
    """Coefficients in ``x**3`` of the two solutions of ``y'' = x y`` (DLMF 9.4)."""
    coefficients = [1.0]
    for k in range(1, terms):
        coefficients.append(coefficients[-1] / ((3 * k - first) * (3 * k + 1 - first)))
    return coefficients[::-1]


_AI_0, _SLOPE_0 = 0.355028053887817239260, 0.258819403792806798405
_SQRT_PI_INVERSE = 0.564189583547756286948


def _airy_ai(x: Any) -> Any:
    cube = x * x * x
    middle = _AI_0 * polynomial(cube, _maclaurin(1)) - _SLOPE_0 * x * polynomial(
        cube, _maclaurin(0)
    )
    size = jnp.abs(x)
    root = jnp.sqrt(jnp.sqrt(size))
    # XLA multiplies by a rounded 1/3 where it divides in float32, and the phase shows it.
    zeta = cast(cast(2 * size * jnp.sqrt(size), jnp.float64) / 3, x.dtype)
    decay = _SQRT_PI_INVERSE * _ratio(1 / zeta, _AN, _AD) / (2 * root * jnp.exp(zeta))
    z = 1 / zeta
    phase = zeta + 0.25 * math.pi
    wave = jnp.sin(phase) * (1 + z * z * _ratio(z * z, _AFN, _AFD))
    wave = wave - jnp.cos(phase) * (z * _ratio(z * z, _AGN, _AGD))
    wave = _SQRT_PI_INVERSE / root * wave
    value = jnp.where(x < -2.09, wave, jnp.where(x >= 2.09, decay, middle))
    return jnp.where(jnp.isinf(x), jnp.nan, jnp.where(x > 103.892, 0, value))


_UNARY: dict[Any, Callable[[Any], Any]] = {
    aten.special_airy_ai.default: _airy_ai,
    aten.special_bessel_j0.default: _j0,
    aten.special_bessel_j1.default: _j1,
    aten.special_bessel_y0.default: _y0,
    aten.special_bessel_y1.default: _y1,
    aten.special_modified_bessel_i0.default: special_functions.i0,
    aten.special_modified_bessel_i1.default: special_functions.i1,
    aten.special_modified_bessel_k0.default: _k0,
    aten.special_modified_bessel_k1.default: _k1,
    aten.special_scaled_modified_bessel_k0.default: lambda x: _k0(x, scaled=True),
    aten.special_scaled_modified_bessel_k1.default: lambda x: _k1(x, scaled=True),
    aten.special_spherical_bessel_j0.default: _spherical_j0,
}
for _op, _function in _UNARY.items():
    lowers(_op)(pointwise(_function))
