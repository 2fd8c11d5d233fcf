"""What the routes for trainers, and those beside them, say for the library's next steps."""

from __future__ import annotations

from dataclasses import fields

from ...fabric.contract.records import RunConfig
from ..access.words import Words, same
from ..schemas.training import EvaluationRequest, PublishRequest, ReceiveRequest, SubmitRequest

PUSH = 'POST {run}/groups {"tasks": [{"seed": 1}], "group_size": 8}'
DEAD = "{run}/dead-letters"
PHRASES = {
    r"fabric\.run\(…\)": 'PUT {run} {"model", "environment"}',
    r"run\.submit\([^()]*\)": PUSH,
    r"for group in run\.groups\(\): …, or `rollfab consume [^`]*`": "POST {run}/groups/receive",
    r", or with a shorter groups\(takeover=…\)": "",
    r"run\.publish\(model\.named_parameters\(\), version=0\)": (
        'PUT {run}/uploads/0/model.safetensors, then POST {run}/versions {"version": 0}'
    ),
    r"`rollfab dead ls[^`]*`; a traceback: `rollfab dead show[^`]*`": f"GET {DEAD}",
    r"`rollfab dead ls[^`]*`": f"GET {DEAD}",
    r"`rollfab dead (?:retry|discard)`": f"POST {DEAD}/retry or /discard",
    r"`rollfab status`": "GET /v1/status",
    r"`rollfab lend report`": "GET /v1/sharing",
    r"--future\b": '"future": true',
    r"the ROLLFAB_URL that it prints": "the page's address that it prints",
}
RENAMED = {"deadline": "deadline_s", "timeout": "wait_s"}
REQUESTS = (EvaluationRequest, PublishRequest, ReceiveRequest, SubmitRequest)
TRAINING = Words(
    PHRASES,
    same(each.name for each in fields(RunConfig))
    | same(name for each in REQUESTS for name in each.model_fields)
    | RENAMED,
)
