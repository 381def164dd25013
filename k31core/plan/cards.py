"""Memory of the cards that recipes name, as the driver reports it."""

GIB = 2**30

CARD_MEMORY = {
    "H100": 80 * GIB,
    "H200": 143771 * 2**20,  # read from nvidia-smi on one H200
    "B200": 180 * 10**9,
    "B300": 288 * 10**9,
    "GB300": 288 * 10**9,
}
"""Bytes by accelerator name. Blackwell figures are the vendor's nominal sizes, not readings."""
