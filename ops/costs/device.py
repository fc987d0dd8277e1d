"""What a device does in a second, for comparing plans of one problem."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """What a device does in a second, and what it cannot share out."""

    flops: float
    """Of products of matrices."""
    bytes: float
    """Of memory read or written."""
    edge: float
    """Seconds of a product in which processors wait at its beginning and its end."""
    launch: float
    """Seconds of any other step beyond what it moves."""
    kept_sums: float = 0.09
    """Part by which a product takes longer that rounds sums of dX to fewer bits: its tiles are
    smaller."""


CPU = Device(flops=1e11, bytes=2e10, edge=2e-5, launch=5e-6)
GPU = Device(flops=7e14, bytes=4e12, edge=4e-5, launch=3e-6)
"""An H200's: at its power limit, where 8192x4096x131072 keeps the tensor cores at 7e14 FLOP/s.
Chunks of 1024 to 8192 tokens of this head take 0.6 to 0.8 ms each beside their products, which is
the time of dW's sums, read and written once."""


def device_of(device_type: str) -> Device:
    """Return the numbers of a device by its type, as torch names it."""
    return CPU if device_type == "cpu" else GPU
