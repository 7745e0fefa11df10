"""The laws of a checkpoint: whether a causal model keeps its positions right, each measured and compared with a threshold.

    from longitude.measure import load
    from longitude.check import check

    for result in check(load("my-model", tokenizer=False)).values():
        print(result.law, result.status, result.measured, result.threshold, result.reason)

`check` takes a checkpoint or a model in memory, tries every law and returns whether it passed, failed, is not applicable or
unknown, with the reason. A law may rest on others: if one of those failed, a failure of this law is not reported, so a bug gives
a single diagnosis.
"""

from longitude.errors import require_extra

require_extra("longitude.check", "models")

from longitude.check.run import check

__all__ = ["check"]
