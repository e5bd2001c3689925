"""Relative errors that tests accept, each with its reason. Compare with ``relative_error``; below is a pass."""

from __future__ import annotations

EXACT = 0.0
"""Same operations on the same numbers in the same order: restarts, refactors, copies. Anything else is a fault."""

FP32_SCALAR = 1e-5
"""Loss and gradient norm in fp32: summed over many elements, so that rounding (6e-8 each) averages out. What remains is
the order of sums across ranks, measured at 1e-7 to 1e-6."""

FP32_TENSOR = 1e-4
"""One gradient or weight tensor in fp32: small tensors at the end of a deep backward amplify the order of sums, and
AdamW divides by the root of a moment that may be as small as the rounding. In 30 layers of published weights
(SmolLM2-135M) gradients are up to 7e-5 away from fp64, in Hugging Face's fp32 as in ours, 1.5e-5 from each other."""

BF16_SCALAR = 1e-2
"""Loss and gradient norm with bf16 compute: 8 bits of mantissa are 4e-3 a rounding, part of which averages out."""

BF16_TENSOR = 5e-2
"""One gradient tensor with bf16 compute or reduction: several 4e-3 roundings add up along the backward."""

MODEL_OUTPUT = 1e-5
"""Logits of two fp32 implementations of one architecture: fused and unfused attention differ in the order of sums;
measured at 2e-6 against Hugging Face."""

MODEL_GRADIENT = 2e-5
"""One gradient tensor of two fp32 implementations of one architecture, two or three small layers with large weights;
measured at 3e-6 on weights and 6e-6 on key biases, whose exact gradient is zero without rotary positions: what is left
is a small difference of large sums."""

DISPATCHED = 1e-6
"""One expert layer in fp32 whose rows are computed elsewhere, or in more pieces: the same products, summed over a
token's experts or an expert's rows in another order; measured at 2e-7."""
