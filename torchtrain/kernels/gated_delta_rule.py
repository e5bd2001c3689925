"""Ops ``chunk_gated_delta_rule`` and ``fused_recurrent_gated_delta_rule``: linear attention with a state that forgets.

Each head keeps a matrix that maps keys to values. A token lets it decay, corrects what it holds for the token's key by
a share of the error, and reads it with the token's query:

    state_t = exp(log_decay_t) state_{t-1};  state_t += beta_t k_t (v_t - k_t state_t)^T;  out_t = q_t state_t / sqrt(H)

with q and k of length one. The state is zero before the first token of every document. Both ops compute this: one token
by token, the other in chunks, between which alone it is sequential.

Shape legend: B = sequences, T = tokens, K = query/key heads, N = value heads (a multiple of K: head n reads key head
n // (N / K)), H = size of a key, V = size of a value, C = tokens of a chunk, L = chunks.

Source: Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule", equations 10 and 13;
the chunked form: section 3.3 and Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence
Length", section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtrain.kernels import flash_linear_attention
from torchtrain.kernels.precision import full_precision
from torchtrain.kernels.registry import Backend, Op

NORM_EPS = 1e-6
"""Added to the squared length of queries and keys."""


@dataclass(frozen=True)
class DeltaRuleProblem:
    """What the choice of a backend depends on."""

    device: str
    dtype: torch.dtype
    key_size: int
    chunk_size: int


class GatedDeltaRule(Protocol):
    """What a backend computes."""

    def __call__(
        self,
        q_BTKH: Tensor,
        k_BTKH: Tensor,
        v_BTNV: Tensor,
        log_decay_BTN: Tensor,
        beta_BTN: Tensor,
        segments_BT: Tensor | None,
        *,
        chunk_size: int,
    ) -> Tensor:
        """Run the rule along every sequence.

        Args:
            q_BTKH: Queries, of any length: they are normalised here.
            k_BTKH: Keys, likewise.
            v_BTNV: Values.
            log_decay_BTN: At most zero, fp32.
            beta_BTN: From 0, leave the state, to 1, replace what it holds for the key; fp32.
            segments_BT: Number of the document in its row, never falling; ``None`` where a row is one document.
            chunk_size: Of the chunked form; the result does not depend on it.

        Returns:
            ``out_BTNV`` in the dtype of the values.

        Numerics: normalised, accumulated and kept in fp32 (fp64 for fp64), one rounding at the end.
        """
        ...


# Compile would unroll both loops, and torch 2.13 plans their backward by strides that solve_triangular does not return.
@torch.compiler.disable
def recurrent(
    q_BTKH: Tensor,
    k_BTKH: Tensor,
    v_BTNV: Tensor,
    log_decay_BTN: Tensor,
    beta_BTN: Tensor,
    segments_BT: Tensor | None,
    *,
    chunk_size: int = 64,
) -> Tensor:
    """Go token by token, as the rule is written; see ``GatedDeltaRule``."""
    with full_precision(v_BTNV.device.type):
        q_BNTH, k_BNTH, v_BNTV, log_decay_BNT, beta_BNT = _prepare(q_BTKH, k_BTKH, v_BTNV, log_decay_BTN, beta_BTN)
        decay_BNT = log_decay_BNT.exp()
        if segments_BT is not None:
            is_start_BT = segments_BT != F.pad(segments_BT, (1, 0))[:, :-1]
            decay_BNT = decay_BNT.masked_fill(is_start_BT[:, None], 0.0)
        state_BNHV = v_BNTV.new_zeros(*q_BNTH.shape[:2], q_BNTH.shape[-1], v_BNTV.shape[-1])
        outs = []
        for q_BNH, k_BNH, v_BNV, kept_BN, beta_BN in _steps(q_BNTH, k_BNTH, v_BNTV, decay_BNT, beta_BNT):
            state_BNHV = state_BNHV * kept_BN[..., None, None]
            held_BNV = (k_BNH[..., None, :] @ state_BNHV).squeeze(-2)
            error_BNV = beta_BN[..., None] * (v_BNV - held_BNV)
            state_BNHV = state_BNHV + k_BNH[..., :, None] * error_BNV[..., None, :]
            outs.append((q_BNH[..., None, :] @ state_BNHV).squeeze(-2))
        return torch.stack(outs, dim=1).to(v_BTNV.dtype)


@torch.compiler.disable
def chunked(
    q_BTKH: Tensor,
    k_BTKH: Tensor,
    v_BTNV: Tensor,
    log_decay_BTN: Tensor,
    beta_BTN: Tensor,
    segments_BT: Tensor | None,
    *,
    chunk_size: int = 64,
) -> Tensor:
    """Solve each chunk at once and pass the state from chunk to chunk; see ``GatedDeltaRule``."""
    num_tokens = v_BTNV.shape[1]
    padding = -num_tokens % chunk_size
    with full_precision(v_BTNV.device.type):
        q, k, v, log_decay, beta = _prepare(q_BTKH, k_BTKH, v_BTNV, log_decay_BTN, beta_BTN)
        # What is appended has beta 0 and no decay: it neither writes nor forgets.
        q, k, v = (F.pad(x, (0, 0, 0, padding)).unflatten(2, (-1, chunk_size)) for x in (q, k, v))
        log_decay, beta = (F.pad(x, (0, padding)).unflatten(2, (-1, chunk_size)) for x in (log_decay, beta))
        masks = _plan_masks(segments_BT, padding, chunk_size)
        terms = _solve_chunks(q, k, v, log_decay, beta, masks)
        out_BNTV = _scan(terms).flatten(2, 3)[:, :, :num_tokens]
        return out_BNTV.transpose(1, 2).to(v_BTNV.dtype)


@dataclass(frozen=True)
class _Masks:
    """What document bounds let through, each with a dim of 1 for heads."""

    same_B1LCC: Tensor
    """Two tokens of one chunk are of one document."""
    reads_B1LC: Tensor
    """A token's document began in an earlier chunk."""
    writes_B1LC: Tensor
    """A token's document is that of the chunk's last token."""
    carries_B1L: Tensor
    """The chunk lies within one document that began in an earlier one."""


@dataclass(frozen=True)
class _ChunkTerms:
    """What the scan needs of all chunks."""

    q_BNLCH: Tensor
    """Queries of the state before the chunk."""
    scores_BNLCC: Tensor
    """Queries of the chunk's own writes."""
    writes_BNLCV: Tensor
    """What is written where the state before the chunk is zero."""
    corrections_BNLCH: Tensor
    """What of that state the chunk has already replaced."""
    k_BNLCH: Tensor
    """Keys of the state after the chunk."""
    decay_BNL: Tensor
    """What of the state before the chunk is left after it."""


def _prepare(q_BTKH: Tensor, k_BTKH: Tensor, v_BTNV: Tensor, log_decay_BTN: Tensor, beta_BTN: Tensor) -> list[Tensor]:
    """Normalise, scale, give every value head its key, put heads before tokens, in at least fp32."""
    group = v_BTNV.shape[2] // k_BTKH.shape[2]
    dtype = torch.promote_types(v_BTNV.dtype, torch.float32)
    q_BTKH, k_BTKH = (
        x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt() for x in (q_BTKH.to(dtype), k_BTKH.to(dtype))
    )
    q_BTKH = q_BTKH * q_BTKH.shape[-1] ** -0.5
    if group > 1:
        q_BTKH, k_BTKH = (x.repeat_interleave(group, dim=2) for x in (q_BTKH, k_BTKH))
    return [x.to(dtype).transpose(1, 2) for x in (q_BTKH, k_BTKH, v_BTNV, log_decay_BTN, beta_BTN)]


def _plan_masks(segments_BT: Tensor | None, padding: int, chunk_size: int) -> _Masks | None:
    if segments_BT is None:
        return None
    # The appended tokens may be of any document.
    segments_BLC = F.pad(segments_BT, (0, padding)).unflatten(1, (-1, chunk_size))[:, None]
    last_BL = segments_BLC[..., -1]
    # Before the first chunk the state is zero, so it does not matter whose it is.
    before_BL = torch.cat((segments_BLC[..., :1, 0], last_BL[..., :-1]), dim=-1)
    return _Masks(
        same_B1LCC=segments_BLC[..., :, None] == segments_BLC[..., None, :],
        reads_B1LC=segments_BLC == before_BL[..., None],
        writes_B1LC=segments_BLC == last_BL[..., None],
        carries_B1L=last_BL == before_BL,
    )


def _solve_chunks(
    q: Tensor, k: Tensor, v: Tensor, log_decay_BNLC: Tensor, beta: Tensor, masks: _Masks | None
) -> _ChunkTerms:
    """Resolve within each chunk that a token's write depends on what the tokens before it wrote.

    Args:
        q: ``[B, N, L, C, H]``, and ``k``, ``v`` likewise.
        k: See ``q``.
        v: See ``q``.
        log_decay_BNLC: Of each token.
        beta: ``[B, N, L, C]``.
        masks: Of the document bounds.
    """
    visible = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril()
    # Each stretch is summed up by itself: of two sums from the chunk's start, which a token that forgets nearly all
    # makes large, the difference would be their rounding.
    between_BNLCC = log_decay_BNLC[..., :, None].where(visible.tril(-1), 0.0).cumsum(dim=-2)
    read_BNLC, write_BNLC = log_decay_BNLC.cumsum(dim=-1).exp(), between_BNLCC[..., -1, :].exp()
    carry_BNL = read_BNLC[..., -1]
    if masks is not None:
        visible = visible & masks.same_B1LCC
        read_BNLC, write_BNLC = read_BNLC * masks.reads_B1LC, write_BNLC * masks.writes_B1LC
        carry_BNL = carry_BNL * masks.carries_B1L
    decay_BNLCC = between_BNLCC.masked_fill(~visible, -torch.inf).exp()
    beta = beta[..., None]
    system_BNLCC = ((beta * k) @ k.mT) * decay_BNLCC
    sources = torch.cat((beta * v, beta * read_BNLC[..., None] * k), dim=-1)
    solved = torch.linalg.solve_triangular(system_BNLCC, sources, upper=False, unitriangular=True)
    writes_BNLCV, corrections_BNLCH = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    return _ChunkTerms(
        q_BNLCH=q * read_BNLC[..., None],
        scores_BNLCC=(q @ k.mT) * decay_BNLCC,
        writes_BNLCV=writes_BNLCV,
        corrections_BNLCH=corrections_BNLCH,
        k_BNLCH=k * write_BNLC[..., None],
        decay_BNL=carry_BNL,
    )


def _scan(terms: _ChunkTerms) -> Tensor:
    """Pass the state through the chunks; returns ``out_BNLCV``."""
    batch_heads, key_size = terms.k_BNLCH.shape[:2], terms.k_BNLCH.shape[-1]
    state_BNHV = terms.k_BNLCH.new_zeros(*batch_heads, key_size, terms.writes_BNLCV.shape[-1])
    outs = []
    for q_BNCH, scores_BNCC, writes_BNCV, corrections_BNCH, k_BNCH, kept_BN in _steps(
        terms.q_BNLCH, terms.scores_BNLCC, terms.writes_BNLCV, terms.corrections_BNLCH, terms.k_BNLCH, terms.decay_BNL
    ):
        written_BNCV = writes_BNCV - corrections_BNCH @ state_BNHV
        outs.append(q_BNCH @ state_BNHV + scores_BNCC @ written_BNCV)
        state_BNHV = state_BNHV * kept_BN[..., None, None] + k_BNCH.mT @ written_BNCV
    return torch.stack(outs, dim=2)


def _steps(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Take tensors apart along dim 2.

    At once, not by index: the backward of each index fills a tensor of the whole size.
    """
    return zip(*(tensor.unbind(dim=2) for tensor in tensors), strict=True)


def _torch_first(problem: DeltaRuleProblem) -> Sequence[str]:
    return ("torch",)


def _fla_is_able(symbol: str) -> Callable[[DeltaRuleProblem], bool]:
    def is_able(problem: DeltaRuleProblem) -> bool:
        is_supported = problem.device == "cuda" and problem.dtype in (torch.bfloat16, torch.float16)
        return (
            is_supported
            and problem.key_size <= 256
            and flash_linear_attention.takes_chunks_of(symbol, problem.chunk_size)
        )

    return is_able


CHUNK_GATED_DELTA_RULE: Op[DeltaRuleProblem, GatedDeltaRule] = Op("chunk_gated_delta_rule", _torch_first)
FUSED_RECURRENT_GATED_DELTA_RULE: Op[DeltaRuleProblem, GatedDeltaRule] = Op(
    "fused_recurrent_gated_delta_rule", _torch_first
)
_FLA_CONDITIONS = (
    "cuda, bfloat16 or float16, keys of at most 256, chunks of 64 unless the installed version takes others"
)
for _op, _plain in ((CHUNK_GATED_DELTA_RULE, chunked), (FUSED_RECURRENT_GATED_DELTA_RULE, recurrent)):
    _op.register(Backend("torch", _plain, lambda problem: True))
    _op.register(
        Backend(
            "flash-linear-attention",
            flash_linear_attention.LazyRule(_op.name),
            _fla_is_able(_op.name),
            plugin="flash-linear-attention",
            conditions=_FLA_CONDITIONS,
        )
    )
