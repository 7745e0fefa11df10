"""lm-eval's harness: the log-likelihoods that it finds are the model's."""

import pytest
import torch

pytest.importorskip("lm_eval", reason="the extra `ecosystem` is not installed: make ecosystem")

pytestmark = [pytest.mark.slow, pytest.mark.ecosystem]


def test_loglikelihoods_and_texts(model, tokenizer):
    """Requests of other lengths in one batch; then greedy text until a word."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model.eval()
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=3, device="cpu", max_length=32)
    pairs = [("a b c", " d e"), ("a", " b"), ("c d e f g h", " i j a"), ("b b", " c")]
    asked = [Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=n) for n, pair in enumerate(pairs)]
    for (context, answer), (found, greedy) in zip(pairs, harness.loglikelihood(asked), strict=True):
        whole, first = tokenizer(context + answer).input_ids, len(tokenizer(context).input_ids)
        with torch.no_grad():
            logits = model(torch.tensor([whole])).logits[0].log_softmax(-1)
        wanted = sum(float(logits[i - 1, whole[i]]) for i in range(first, len(whole)))
        assert found == pytest.approx(wanted, abs=1e-4)
        assert greedy == all(int(logits[i - 1].argmax()) == whole[i] for i in range(first, len(whole)))
    until = {"until": ["<eos>"], "max_gen_toks": 5, "do_sample": False}
    calls = [(context, dict(until)) for context, _ in pairs]
    asked = [Instance(request_type="generate_until", doc={}, arguments=call, idx=n) for n, call in enumerate(calls)]
    for (context, _), text in zip(calls, harness.generate_until(asked), strict=True):
        x = torch.tensor([tokenizer(context).input_ids])
        out = model.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=5, do_sample=False)
        assert text.split() == tokenizer.decode(out[0, x.shape[1] :], skip_special_tokens=True).split()
