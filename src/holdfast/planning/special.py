"""Array types, typed access to SciPy's special functions, and checks of arguments.

Quantiles are computed here because importing `scipy.stats` takes a second.
"""

from __future__ import annotations

from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import BadInputError

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]
BoolArray: TypeAlias = NDArray[np.bool_]

#: A number, or an array that broadcasts with the other arguments.
Floats: TypeAlias = float | FloatArray


def _load_special() -> Any:
    """Import and return `scipy.special`."""
    from scipy import special  # pyright: ignore[reportMissingTypeStubs] - a slow import that few callers need

    return special


def as_floats(values: Floats | IntArray) -> FloatArray:
    """Return `values` as float64, any shape."""
    return np.asarray(values, dtype=np.float64)


def regularized_beta(a: FloatArray, b: FloatArray, x: FloatArray) -> FloatArray:
    """Return the regularised incomplete beta function I_x(a, b)."""
    return cast(FloatArray, _load_special().betainc(a, b, x))


def lambert_w(z: FloatArray) -> FloatArray:
    """Return the principal real branch of Lambert's W for z >= -1/e."""
    return np.real(_load_special().lambertw(z)).astype(np.float64)


def student_quantile(share: float, freedom: int) -> float:
    """Return the value that Student's t with `freedom` degrees of freedom stays below with probability `share`."""
    return float(_load_special().stdtrit(freedom, share))


def chi_square_quantile(share: float, freedom: int) -> float:
    """Return the value that chi-square with `freedom` degrees of freedom stays below with probability `share`."""
    return float(2.0 * _load_special().gammaincinv(freedom / 2.0, share))


def require_positive(key: str, value: Floats) -> None:
    """Raise `BadInputError` naming `key` unless every element is above 0; infinity is allowed."""
    _require_all(key, value, as_floats(value) > 0, "must be greater than 0")


def require_not_negative(key: str, value: Floats) -> None:
    """Raise `BadInputError` naming `key` unless every element is 0 or more."""
    _require_all(key, value, as_floats(value) >= 0, "must be 0 or more")


def require_finite(key: str, value: Floats) -> None:
    """Raise `BadInputError` naming `key` unless every element is a finite number."""
    _require_all(key, value, np.isfinite(as_floats(value)), "must be a finite number")


def require_fraction(key: str, value: Floats) -> None:
    """Raise `BadInputError` naming `key` unless every element lies in 0..1."""
    values = as_floats(value)
    _require_all(key, value, (values >= 0) & (values <= 1), "must lie between 0 and 1")


def _require_all(key: str, value: Floats, holds: BoolArray, rule: str) -> None:
    """Raise `BadInputError` with the `rule` and the first wrong value unless all elements of `holds` are true."""
    if not np.all(holds):
        wrong = as_floats(value)[~np.asarray(holds)].flat[0]
        raise BadInputError(f"{key} = {wrong:g}: {rule}")
