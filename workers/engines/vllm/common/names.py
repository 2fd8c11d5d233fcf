"""Names that a vLLM and we share, and its logger. The standard library alone: every vLLM process reads this."""

from __future__ import annotations

import logging

BACKEND = "rollfab"  # of weight transfer
PROBE = "ROLLFAB_PROBE"  # environment variable: the page in which a serving team's vLLM shows what it does
MPS = "ROLLFAB_VLLM_MPS"  # environment variable: an engine of ours shares faults with a serving one, by CUDA's MPS
PRIOR_COUNT = "rollfab_prior_count"  # in a request's extra_args: the last tokens of its prompt that its turn has made

log = logging.getLogger("vllm.rollfab")  # below vLLM's own logger: in its log, in its format
