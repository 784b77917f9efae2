"""Whatever happens to an engine, in whatever order: the books add up after each step and every answer is right."""

from dataclasses import replace

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.beam import BeamParams
from engine.request import Terms
from tests.engine.fake_runner import FULL, HYBRID, SLIDING, TWO_WINDOWS, FakeRunner
from tests.engine.rig import Rig

# source and adapter; the first two share a checkpoint, the first three its weights
MODELS = {"one": ("a", None), "two": ("a", None), "adapted": ("a", "z"), "three": ("b", None)}
TEXTS = [*(np.random.default_rng(seed).integers(10, 300, 120).tolist() for seed in range(3)), [7, 8, 9] * 40]
LENGTHS = st.one_of(st.integers(1, 15), st.integers(1, 64), st.sampled_from([16, 32, 48, 64, 17, 33]))
PROMPTS = st.builds(lambda text, length: text[:length], st.sampled_from(TEXTS), LENGTHS)
ANSWERS = st.one_of(st.integers(1, 6), st.integers(30, 70))
SYSTEM_PROMPTS = ("", "short", "a system prompt of some blocks, " * 2, "a system prompt of some other blocks, " * 2)


class EngineUnderFire(RuleBasedStateMachine):
    @initialize(
        a=st.sampled_from([FULL, HYBRID, SLIDING]),
        b=st.sampled_from([HYBRID, TWO_WINDOWS]),
        pages=st.sampled_from([32, 40, 100]),
        budget=st.sampled_from([16, 40, 512]),
        sequences=st.sampled_from([2, 5, 64]),
        sharing=st.booleans(),
        guesses=st.sampled_from([0, 3]),
        seed=st.integers(0, 5),
    )
    def start(self, a, b, pages, budget, sequences, sharing, guesses, seed):
        base = FakeRunner(a, "a")
        self.rig = Rig(
            {"a": base, "a with z": base.adapted("z"), "b": FakeRunner(b, "b")},
            pages,
            seed,
            max_batch_tokens=budget,
            prefill_tokens_beside_decodes=max(16, budget // 2),
            max_sequences=sequences,
            enable_prefix_cache=sharing,
            speculative_tokens=guesses,
            speculative_sequences=8,
        )
        self.answers, self.several = [], []
        for name, (source, adapter) in MODELS.items():
            self.rig.put(name, source, adapter=adapter)

    def names(self):
        return [status.name for status in self.rig.engine.models() if status.status == "ready"]

    @precondition(lambda self: self.names())
    @rule(
        data=st.data(), asked=st.lists(st.tuples(PROMPTS, ANSWERS, st.sampled_from([0, 1.0])), min_size=1, max_size=8)
    )
    def ask(self, data, asked):
        name = data.draw(st.sampled_from(self.names()))
        space = self.rig.engine._models[name].checkpoint.space
        for prompt, max_tokens, temperature in asked:
            if self.rig.memory.longest(space, 4096) >= len(prompt) + max_tokens:
                self.answers.append(self.rig.ask(name, prompt, max_tokens, temperature))

    @precondition(lambda self: self.names())
    @rule(
        data=st.data(),
        prompt=PROMPTS,
        max_tokens=st.integers(1, 40),
        n=st.integers(2, 4),
        terms=st.builds(Terms, st.sampled_from("xyz"), st.integers(-1, 1)),
        searched=st.booleans(),
    )
    def ask_for_several(self, data, prompt, max_tokens, n, terms, searched):
        """Forks, or the beams of a search; only that each ends once is looked at here, and the books."""
        name = data.draw(st.sampled_from(self.names()))
        space = self.rig.engine._models[name].checkpoint.space
        fits = self.rig.memory.longest(space, 4096) >= len(prompt) + max_tokens
        if fits and n <= self.rig.config.max_sequences:
            terms = replace(terms, beam=BeamParams(n)) if searched else terms
            answer = self.rig.ask(name, prompt, max_tokens, 1.0, n=n, terms=terms)
            self.several.append((answer, n))

    @precondition(lambda self: self.several)
    @rule(data=st.data())
    def abort_several(self, data):
        self.rig.engine.abort(data.draw(st.sampled_from(self.several))[0].id)

    @rule(steps=st.integers(1, 20))
    def step(self, steps):
        for _ in range(steps):
            self.rig.engine.step()

    @rule()
    def run_on(self):
        for _ in range(60):
            self.rig.engine.step()

    @precondition(lambda self: self.answers)
    @rule(data=st.data())
    def abort(self, data):
        self.rig.engine.abort(data.draw(st.sampled_from(self.answers)).id)

    @rule(
        name=st.sampled_from(list(MODELS)),
        system_prompt=st.sampled_from((None, *SYSTEM_PROMPTS)),
        share=st.sampled_from([0.0, 0.3]),
        indeed=st.integers(0, 3),
    )
    def load_or_unload(self, name, system_prompt, share, indeed):
        if indeed < 3:  # seldom enough that most requests come to their end
            self.rig.engine.step()
        elif system_prompt is not None:
            source, adapter = MODELS[name]
            self.rig.put(name, source, system_prompt, wait=False, kv_share=share, adapter=adapter)
        elif name in [status.name for status in self.rig.engine.models()]:
            self.rig.engine.delete_model(name)

    @rule(name=st.sampled_from(list(MODELS)), sleeps=st.booleans(), indeed=st.integers(0, 1))
    def sleep_or_wake(self, name, sleeps, indeed):
        if indeed and name in [status.name for status in self.rig.engine.models()]:
            (self.rig.engine.sleep_model if sleeps else self.rig.engine.wake_model)(name)

    @invariant()
    def books_add_up(self):
        if hasattr(self, "rig"):
            self.rig.memory.check_integrity()

    def teardown(self):
        if not hasattr(self, "rig"):
            return
        self.rig.drain()
        for answer, n in self.several:
            ends = sorted(event.index for event in answer.events if event.finish_reason)
            assert ends == list(range(n)), "each choice ends once"
        for answer in self.answers:
            expected = answer.expected()
            assert answer.reason is not None, "a request was forgotten"
            if answer.reason == "error":
                words = ("was removed", "was put to sleep", "beside the pinned")
                assert any(each in answer.last.error for each in words), answer.last.error
            if answer.reason == "length":
                assert answer.token_ids == expected
            else:
                assert answer.token_ids == expected[: len(answer.token_ids)]


EngineUnderFire.TestCase.settings = settings(
    max_examples=12, stateful_step_count=40, suppress_health_check=list(HealthCheck)
)
TestEngineUnderFire = EngineUnderFire.TestCase
