"""How much faster a plan of stale keys and values has to be than an exact one, by docs/drift.md."""

#: Steps -> patches -> mean PSNR in dB against one process, of stale_kv reuse after one step of warm-up; of
#: several cfg the least.
MEASURED = {
    8: {2: 39.1, 4: 36.1, 8: 34.8},
    12: {2: 40.3, 4: 38.8, 8: 36.8},
    20: {2: 42.7, 4: 40.3, 8: 37.4},
    28: {2: 45.8, 4: 43.6, 8: 42.4},
}
#: More than so many dB cannot be seen.
INVISIBLE = 40.0
#: Under so many steps no plan has more than so many patches: they would be 35 dB.
FEW_STEPS, MAX_PATCHES = 16, 4
#: A plan whose result is not one GPU's has to be so much faster than one whose is, and so much more for each
#: dB that can be seen.
STALE, DECIBEL = 1.05, 1.03


def drifts_too_far(steps: int, patches: int) -> bool:
    """Return whether a plan of so many patches is none for auto."""
    return steps < FEW_STEPS and patches > MAX_PATCHES


def penalty(steps: int, patches: int) -> float:
    """Return how many times as fast as an exact plan a stale one has to be: by the nearest measurement of
    as few steps and as many patches."""
    row = MEASURED[max((each for each in MEASURED if each <= steps), default=min(MEASURED))]
    size = min((each for each in row if each >= patches), default=max(row))
    return STALE * DECIBEL ** max(0.0, INVISIBLE - row[size])
