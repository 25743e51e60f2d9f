"""Data types and operators, by name and by number in the ABI."""

from __future__ import annotations

#: Data types by number in the ABI.
DTYPES = {
    "uint8": 0,
    "int32": 1,
    "int64": 2,
    "float16": 3,
    "bfloat16": 4,
    "float32": 5,
    "float64": 6,
    "float8_e4m3fn": 7,
    "float8_e5m2": 8,
}
# Integers whose sums and products have the same bits as those of another type.
_SAME_BITS = {"int8": "uint8", "uint32": "int32", "uint64": "int64"}
#: The data types that there are reductions of, by name.
REDUCIBLE = ("bool", *_SAME_BITS, *DTYPES)
OPS = {"sum": 0, "avg": 1, "min": 2, "max": 3, "prod": 4}


def reduction(dtype: str, op: str) -> tuple[int, int] | None:
    """Data type and operator as the library takes them, None for what it cannot do."""
    if dtype == "bool":
        # Sums of truth values are "or", products are "and".
        dtype, op = "uint8", {"sum": "max", "prod": "min", "max": "max", "min": "min"}.get(op, "")
    elif op in ("sum", "prod"):
        dtype = _SAME_BITS.get(dtype, dtype)
    elif op == "avg" and "float" not in dtype:
        return None
    if dtype not in DTYPES or op not in OPS:
        return None
    return DTYPES[dtype], OPS[op]
