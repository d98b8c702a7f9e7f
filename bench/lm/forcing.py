"""Teacher forcing inside an SGLang server: note the model's loss of the true byte, then force it.

SGLang's sampler calls a custom logit processor before it takes the argmax, once a step, with the
rows of the requests that asked for it (`--enable-custom-logit-processor`). Imports only torch: the
server unpickles the class by its name, so this module must be on the server's path.
"""

from __future__ import annotations

import json
import os
import pickle
from typing import Any

import torch


class TeacherForcing:
    """Per request, `custom_params` has `targets`, the bytes to force, and `path`, a file to write.

    The count of steps is kept here, in the request's own dict: under the overlap scheduler the
    request's output lags by a step. After the last target, the losses go to `path` as JSON; a step
    past it (the overlap scheduler runs one) is left alone. Who reads the file must compare the
    request's output with the targets: a step counted twice or never shows there.
    """

    def __call__(self, logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
        """[rows, vocab] float32 in, the same shape out: all but the target far below it."""
        steps = [p.setdefault("step", 0) for p in params]
        rows = [r for r, p in enumerate(params) if steps[r] < len(p["targets"])]
        if not rows:
            return logits
        targets = [params[r]["targets"][steps[r]] for r in rows]
        where = torch.tensor([rows, targets]).to(logits.device, non_blocking=True)
        index, target = where[0], where[1][:, None]
        losses = -torch.log_softmax(logits[index].float(), dim=-1).gather(1, target)[:, 0]
        forced = logits.clone()
        forced[index] = torch.full_like(logits[index], -1e4).scatter_(1, target, 0.0)
        for number, row in enumerate(rows):
            request = params[row]
            request.setdefault("losses", []).append(losses[number])
            request["step"] += 1
            if request["step"] == len(request["targets"]):
                found = torch.stack(request.pop("losses")).tolist()
                with open(request["path"] + ".part", "w") as file:
                    json.dump(found, file)
                os.rename(request["path"] + ".part", request["path"])
        return forced


def serialized() -> str:
    """What `CustomLogitProcessor.from_str` reads: hex of the class, pickled by its name."""
    return json.dumps({"callable": pickle.dumps(TeacherForcing).hex()})
