"""The engine: one thread that owns pool, scheduler and weights, and the story of a step. Knows no HTTP.

    step = commands -> schedule (prefix match, blocks) -> forward -> draw -> commit -> fork -> events

Every public method may be called from any thread. What changes pages or sequences is handed to the engine's thread as
a command, which runs between two steps; checkpoints are loaded on threads of their own and arrive as commands too. The
registry (which model has which checkpoint) is behind `_lock`. Tests that need every step under control do not call
`start` and call `step` themselves.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine import figures
from engine.architectures import Decoders, Runner, adapted, load_checkpoint
from engine.batch import Batches
from engine.beam import Beam, BeamSearch
from engine.checkpoints import fetch, fetch_adapter
from engine.choice import Choice
from engine.config import EngineConfig
from engine.drafts import Drafter
from engine.drawing import Draw, draw
from engine.errors import (
    CheckpointError,
    ContextTooLong,
    EngineDead,
    EngineError,
    InvalidParameter,
    ModelAsleep,
    ModelNotFound,
    ModelNotReady,
    QueueFull,
)
from engine.kv.geometry import default_page_bytes
from engine.kv.manager import CheckpointKV, Turn
from engine.kv.page_map import PageMap
from engine.kv.pool import PagePool
from engine.kv.reserved import kv_manager
from engine.models import Checkpoint, Model, ModelSpec, ModelStatus
from engine.occupancy import occupancy
from engine.request import Deliver, Request, Terms
from engine.scheduler import Scheduler, Step
from engine.sequence import GenerationEvent, SamplingParams, Sequence
from engine.watchdog import Deadlines, Watchdog, dump
from kernels import drawing
from kernels.spec import BLOCK_TOKENS, Backend

__all__ = ["Engine", "GenerationEvent", "ModelSpec", "ModelStatus", "SamplingParams"]

log = logging.getLogger(__name__)

Progress = Callable[[int, int, str], None]
Load = Callable[[str, str | None, str | None, Progress], Runner]  # source, precision, adapter, progress -> loaded
Command = tuple[Callable[[], None], Callable[[str], None] | None]  # what to do; whom to tell if the engine ends first
USUAL_TERMS = Terms()
MOST_NAMED = 8  # of what is wrong in a list, in an error
SETTLE_SECONDS = 1.0  # of idleness, before the pool's books are checked


class Engine:
    """`load` fetches and loads a checkpoint, on a thread of its own; by default from the source into `backend`."""

    def __init__(
        self,
        config: EngineConfig,
        backend: Backend,
        load: Load | None = None,
        pool: PagePool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        device = backend.device if backend else torch.device("cpu")
        dtype = torch_dtype(config.dtype, device)
        page_bytes = config.page_bytes or default_page_bytes(dtype.itemsize)
        pool = pool or PagePool(config.kv_memory_bytes // page_bytes, page_bytes, device=device)
        self.config = config
        self.failure: str | None = None  # why the thread ended, if it was not told to
        self._step_began: float | None = None  # time.monotonic() of the step that runs now; None between two
        self.page_map = PageMap(pool.total)
        self.memory = kv_manager(
            config.policy,
            pool,
            chunk_tokens=config.max_batch_tokens,
            share_prefixes=config.enable_prefix_cache,
            page_map=self.page_map,
        )
        self.scheduler = Scheduler(
            self.memory,
            max_sequences=config.max_sequences,
            max_batch_tokens=config.max_batch_tokens,
            prefill_tokens_beside_decodes=config.prefill_tokens_beside_decodes,
            speculative_tokens=config.speculative_tokens,
            speculative_sequences=config.speculative_sequences,
        )
        self.counts = figures.Counts()
        self._batches = Batches()
        self._draw_kernel = getattr(backend, "draw", drawing.draw)
        self._load_checkpoint = load or partial(load_from_source, config.cache_folder, backend, dtype, Decoders())
        self._lock = threading.RLock()
        self._models: dict[str, Model] = {}
        self._checkpoints: dict[str, Checkpoint] = {}
        self._loaded: dict[CheckpointKV, Checkpoint] = {}
        self._requests: dict[str, Request] = {}
        self._commands: deque[Command] = deque()
        self._clock = clock
        self._deadlines = Deadlines()
        self._watchdog = Watchdog(config.stall_seconds)
        self._wake = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._send: Callable[[], None] = lambda: None

    # Life

    def start(self, send: Callable[[], None] = lambda: None) -> None:
        """`send` is called on the engine's thread when all events of a step are delivered; it must not block."""
        self._send = send
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends all requests ("abort") and the thread. Returns when both have ended."""
        self._closing = True
        self._wake.set()
        if self._thread:
            self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def step_seconds(self) -> float:
        """For how long the step that runs now has run: one that does not end is a thread that hangs. 0 between two."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def _run(self) -> None:
        why = "the engine is stopping"
        try:
            while not self._closing:
                self._step_began = time.monotonic()
                busy = self.step()
                self._step_began = None
                self._send()
                if not busy:
                    self._sleep()
        except BaseException as error:
            self.failure = why = f"the engine thread ended: {type(error).__name__}: {error}"
            log.critical("the engine thread ended", exc_info=error)
        finally:
            self._end_everything(why)

    def _sleep(self) -> None:
        """Until a command comes, using no processor. Once settled, checks that nothing is held but what is pinned."""
        self._wake.clear()
        if self._commands or self._closing:
            return
        if not self._wake.wait(SETTLE_SECONDS):
            self.memory.check_integrity(idle=True)
            self._wake.wait()

    def _end_everything(self, why: str) -> None:
        with self._lock:
            self._closing = True
            commands, self._commands = self._commands, deque()
        for _, tell in commands:
            if tell:
                tell(why)
        for request in list(self._requests.values()):
            self._stopped(request, why)
        self._requests.clear()
        self._send()

    def _stopped(self, request: Request, why: str) -> None:
        self._turn_away(request, "error" if self.failure else "abort", why)

    # The step

    def step(self) -> bool:
        """One forward over one checkpoint's weights, and all around it. False where there was nothing to do."""
        self._run_commands()
        if self.scheduler.idle:
            return False
        self._end_what_takes_too_long()
        began = time.perf_counter()
        step = self.scheduler.schedule()
        for sequence in step.unservable:
            self._fail(sequence, "its KV does not fit into the pool beside the pinned system prompts")
        if step.sequences:
            self._compute(step)
        if self.config.check_integrity:
            self.memory.check_integrity(idle=self.scheduler.idle)
        self.counts.steps += 1
        self.counts.step_seconds += time.perf_counter() - began
        return True

    def _end_what_takes_too_long(self) -> None:
        now = self._clock()
        for request_id in self._deadlines.passed(now):
            if request := self._requests.get(request_id):
                self._end(request, "deadline", f"not done within {request.terms.deadline_seconds:g} seconds")
        if stuck := self._watchdog.stuck(self._requests.values(), now):
            log.error("%d requests make no progress:\n%s", len(stuck), dump(self.scheduler, self.memory))
        for request in stuck:
            why = f"it made no progress for {self.config.stall_seconds:,} seconds; the engine's log has more"
            self._end(request, "error", why)

    def _compute(self, step: Step) -> None:
        checkpoint, guessed = self._loaded[step.space], [sequence.drafted for sequence in step.sequences]
        adapters = [self._loaded[sequence.space].runner.adapter for sequence in step.sequences]
        try:
            batch = self._batches.build(step, adapters)
            logits = checkpoint.runner.forward(self.memory.pool.memory, batch)
            draws = draw(step, logits, self._draw_kernel)
        except Exception as error:
            log.exception("a forward of %s failed", checkpoint.name)
            for sequence in step.sequences:
                self._fail(sequence, f"the forward failed: {type(error).__name__}: {error}")
            return
        for each in draws:
            if each.token is None and not each.choice.finished:
                sequence = each.choice.sequence or each.choice.request.sequence
                self._fail(sequence, "the checkpoint gave logits that are not numbers")
        for sequence, count, guesses in zip(step.sequences, step.counts, guessed, strict=True):
            if sequence.table is not None:
                self.memory.commit(sequence, count - guesses + sequence.drafted)
                if guesses:
                    self._checked(sequence, guesses)
                self.counts.computed_tokens += count
                if sequence.uncomputed == 0 and sequence.length == sequence.limit:
                    self._prompt_computed(sequence)
        for each in draws:
            if each.choice.forks:
                self._fork(each.choice)
        for each in draws:
            if isinstance(each.choice, Beam):
                self._search_on(each.choice.search)
            elif not each.choice.finished:
                self._accept(each)

    def _checked(self, sequence: Sequence, guesses: int) -> None:
        """Of so many guesses `drafted` were right: gives back what the others took."""
        self.memory.give_back(sequence)
        sequence.drafter.learn(guesses, sequence.drafted, sequence.computed)
        self.counts.drafted_tokens += guesses
        self.counts.accepted_tokens += sequence.drafted

    def _fork(self, first: Choice) -> None:
        """Lets the other choices of a request begin where the first has computed the prompt."""
        forks, first.forks = first.forks, ()
        for choice in reversed(forks):
            if not choice.finished:
                choice.sequence = first.sequence.fork(owner=choice)
                self.scheduler.fork(first.sequence, choice.sequence)

    def _search_on(self, search: BeamSearch) -> None:
        """When all beams have looked ahead, lets the likeliest continuations go on, each from its own."""
        if search.done or not search.request.choices or not search.ready:
            return
        heirs = search.advance()
        for beam in [each for each, children in heirs.items() if not children]:
            self.scheduler.remove(beam.sequence)
            beam.sequence.owner = None
        for beam, (first, *others) in [item for item in heirs.items() if item[1]]:
            for child in others:
                child.sequence = beam.sequence.fork(owner=child)
                self.scheduler.fork(beam.sequence, child.sequence)
            first.sequence, beam.sequence.owner = beam.sequence, first
        for beam in search.beams:
            beam.sequence.append(beam.tokens[-1])
            self.scheduler.go_on(beam.sequence)
        if search.done:
            for choice, found in zip(list(search.request.choices), search.ended, strict=False):
                event = choice.found(found.tokens, found.reason)
                self.counts.generated_tokens += len(found.tokens)
                self._forget(choice)
                self._deliver(search.request, event)

    def _accept(self, drawn: Draw) -> None:
        choice = drawn.choice
        try:
            event = choice.accept(drawn.token, drawn.score)
        except Exception as error:
            log.exception("request %s: token %d cannot be taken", choice.request.id, drawn.token)
            return self._fail(choice.sequence, f"token {drawn.token} cannot be taken: {error}")
        self.counts.generated_tokens += 1
        if event.finish_reason:
            self.counts.answered(event.prompt_tokens, event.completion_tokens)
            self._forget(choice)
        self._deliver(choice.request, event)

    def _fail(self, sequence: Sequence, why: str) -> None:
        """Ends what a sequence is part of and tells its owner; what that alone wrote is not found again."""
        owner = sequence.owner
        self.scheduler.remove(sequence, in_doubt=True)
        if isinstance(owner, Model):
            self._model_failed(owner, f"its system prompt could not be computed: {why}")
        elif owner is not None:
            for sibling in owner.request.sequences:
                self.scheduler.remove(sibling, in_doubt=True)
            self._end(owner.request, "error", why)

    def _end(self, request: Request, reason: str, error: str | None = None) -> None:
        """Ends all choices of a request that have not ended, in whatever state they are."""
        choices = list(request.choices)
        events = [choice.end(reason, error) for choice in choices]
        for choice in choices:
            self._forget(choice)
        for event in events:
            self._deliver(request, event)

    def _turn_away(self, request: Request, reason: str, error: str | None = None) -> None:
        """Ends a request that was never scheduled."""
        choices, request.choices = request.choices, []
        for choice in choices:
            self._deliver(request, choice.end(reason, error))

    def _forget(self, choice: Choice) -> None:
        choice.finished = True
        request = choice.request
        if choice.sequence:
            self.scheduler.remove(choice.sequence)
            choice.sequence.owner = None
        if choice in request.choices:
            request.choices.remove(choice)  # or request and checkpoint would live on in a circle
        if not request.choices:
            self._requests.pop(request.id, None)
            self._forget_search(request)

    def _forget_search(self, request: Request) -> None:
        if request.search:
            for sequence in request.sequences:
                self.scheduler.remove(sequence)
                sequence.owner = None
            request.search.beams, request.search = [], None

    def _deliver(self, request: Request, event: GenerationEvent) -> None:
        try:
            request.deliver(event)
        except Exception:
            log.exception("request %s: whoever waits for it cannot be told", request.id)
            for choice in list(request.choices):
                self._forget(choice)

    # Commands

    def _post(self, do: Callable[[], None], tell: Callable[[str], None] | None = None) -> None:
        """Has a command run on the engine's thread before its next step. Raises EngineDead."""
        with self._lock:
            self._require_alive()
            self._commands.append((do, tell))
        self._wake.set()

    def _require_alive(self) -> None:
        if self._closing:
            raise EngineDead(self.failure or "the engine is stopping")

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Its value, taken between two steps."""
        if self._thread is None:
            return question()
        answer: Future = Future()

        def reply() -> None:
            try:
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)

        self._post(reply, lambda why: answer.set_exception(EngineDead(why)))
        return answer.result()

    def _run_commands(self) -> None:
        while self._commands:
            do, _ = self._commands.popleft()
            do()

    # Requests

    def submit(
        self,
        model: str,
        prompt_ids: list[int],
        params: SamplingParams,
        deliver: Deliver,
        terms: Terms = USUAL_TERMS,
        runner: Runner | None = None,
    ) -> str:
        """Queues a request and returns its id. Its events come through `deliver`, on the engine's thread, until each of
        its choices had one with a finish_reason; `deliver` must not block. `runner`: whose tokens and grammar these are
        (`runner_of`), for who took long to make them: a model that has another by now refuses.

        Raises ModelNotFound, ModelNotReady, ContextTooLong, BadRequest, QueueFull, EngineDead.
        """
        served = self._ready(model)
        if runner is not None and runner is not served.checkpoint.runner:
            raise ModelNotReady(f"{model} was replaced while its prompt was read; ask again")
        self._check(served, prompt_ids, params, terms)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        request = Request(uuid.uuid4().hex, served, prompt_ids, params, seed, deliver, terms)
        if terms.deadline_seconds is not None:
            request.deadline = self._clock() + terms.deadline_seconds
        self._post(partial(self._add, request), partial(self._stopped, request))
        return request.id

    def abort(self, request_id: str) -> None:
        """Ends a request in whatever state it is ("abort") and frees what it holds; nothing, where it has ended."""
        if not self._closing:
            self._post(partial(self._abort, request_id))

    def _check(self, model: Model, prompt_ids: list[int], params: SamplingParams, terms: Terms) -> None:
        if not prompt_ids:
            raise InvalidParameter("prompt", "prompt is empty")
        vocab_size = model.checkpoint.runner.vocab_size
        if not 0 <= min(prompt_ids) <= max(prompt_ids) < vocab_size:
            raise InvalidParameter("prompt", f"prompt has tokens outside 0 to {vocab_size - 1:,}")
        longest = self._longest(model, prompt_ids, terms.cache_salt, params.prompt_logprobs)
        if len(prompt_ids) + params.max_tokens > longest:
            raise ContextTooLong(model.spec.name, len(prompt_ids), longest, params.max_tokens)
        if terms.beam and terms.beam.width > self.scheduler.max_sequences:
            most = f"at most {self.scheduler.max_sequences:,} sequences run at once"
            raise InvalidParameter("beam_width", f"beam_width is {terms.beam.width:,}; {most}")
        waiting = len(self.scheduler.waiting) + len(self._commands)
        if waiting >= self.config.max_waiting:
            raise QueueFull(f"{waiting:,} requests wait, as many as max_waiting allows; try again later")

    def longest(self, model: str, prompt_ids: list[int], *, salt: str = "", scored: bool = False) -> int:
        """The most tokens that this prompt and its answer can reach now: where the pool sets the bound, fewer than the
        model's `context_length` if it does not share the system prompt. Raises as `runner_of`."""
        return self._longest(self._ready(model), prompt_ids, salt, scored)

    def _longest(self, model: Model, prompt_ids: list[int], salt: str, scored: bool) -> int:
        pin = model.pin if model.shares_pin(prompt_ids, salt=salt, scored=scored) else None
        return self.memory.longest(model.checkpoint.space, model.limit, pin)

    def _add(self, request: Request) -> None:
        model = self._models.get(request.model.spec.name)
        if model is None or model.checkpoint is not request.model.checkpoint:
            why = "was put to sleep" if model and model.status == "sleeping" else "was removed"
            return self._turn_away(request, "error", f"the model {request.model.spec.name} {why}")
        request.model = model  # which may have replaced the one that was asked
        if request.params.max_tokens == 0 and not request.params.prompt_logprobs:
            return self._turn_away(request, "length")
        self._requests[request.id] = request
        if request.deadline is not None:
            self._deadlines.add(request)
        if self.config.speculative_tokens and not request.terms.beam and not request.terms.grammar:
            request.sequence.drafter = Drafter(self.config.speculative_tokens)
        self.scheduler.add(request.sequence)

    def _abort(self, request_id: str) -> None:
        if request := self._requests.get(request_id):
            self._end(request, "abort")

    # Models

    def put_model(self, spec: ModelSpec) -> ModelStatus:
        """Registers a model and has its checkpoint loaded. The same spec again changes nothing (a failed one is tried
        again); another one under the same name replaces it, and its requests go on where the checkpoint stays. Raises
        EngineDead, and CheckpointError or InvalidParameter for what is known at once not to work."""
        with self._lock:
            self._require_alive()
            known = self._checkpoints.get(spec.weights)
            if known and known.runner:
                check_spec(spec, known.runner)
            check_share(spec, [model.spec for model in self._models.values()])
            old = self._models.get(spec.name)
            if old and old.spec == spec and old.status != "failed":
                return old.describe()
            return self._enter(spec).describe()

    def _enter(self, spec: ModelSpec) -> Model:
        """Has a model of this spec made ready, in the place of the one of its name. Under `_lock`."""
        old = self._models.get(spec.name)
        model = self._models[spec.name] = Model(spec, self._checkpoint(spec))
        model.checkpoint.users.append(model)
        if old:
            self._post(partial(self._retire, old, successor=model))
        if model.checkpoint.runner:
            self._post(partial(self._prepare, model))
        return model

    def delete_model(self, name: str) -> None:
        """Its requests end with an error; its pages are free before the next question is answered. Raises
        ModelNotFound, EngineDead."""
        with self._lock:
            self._post(partial(self._retire, self._named(name)))
            del self._models[name]

    def sleep_model(self, name: str) -> ModelStatus:
        """As `delete_model`, but the model keeps its name: a request is refused until `wake_model`, for it would take
        the memory back that was wanted for something else. Its weights go with the last one awake that shares them.
        Raises ModelNotFound, EngineDead."""
        with self._lock:
            model = self._named(name)
            if model.status != "sleeping":
                self._models[name] = model.asleep()
                self._post(partial(self._retire, model, why="was put to sleep"))
            return self._models[name].describe()

    def wake_model(self, name: str) -> ModelStatus:
        """Has a sleeping model loaded again, and its system prompt computed and pinned; nothing, where it is awake.
        Raises ModelNotFound, EngineDead."""
        with self._lock:
            model = self._named(name)
            return self._enter(model.spec).describe() if model.status == "sleeping" else model.describe()

    def _named(self, name: str) -> Model:
        self._require_alive()
        if name not in self._models:
            raise ModelNotFound(name)
        return self._models[name]

    def models(self) -> list[ModelStatus]:
        with self._lock:
            return [model.describe() for model in self._models.values()]

    def runner_of(self, name: str) -> tuple[Runner, ModelSpec]:
        """The loaded checkpoint of a ready model, and its spec with `context_length` filled in. Raises ModelNotFound,
        ModelNotReady, EngineDead."""
        model = self._ready(name)
        return model.checkpoint.runner, replace(model.spec, context_length=model.context_length)

    def _ready(self, name: str) -> Model:
        with self._lock:
            model = self._named(name)
        if model.status == "sleeping":
            raise ModelAsleep(name)
        if model.status != "ready":
            raise ModelNotReady(
                f"{name} failed to load: {model.reason}" if model.reason else f"{name} is still loading"
            )
        return model

    def _checkpoint(self, spec: ModelSpec) -> Checkpoint:
        """The one that a model needs: loaded, on its way, or set on its way now."""
        name = spec.weights
        if name not in self._checkpoints:
            checkpoint = self._checkpoints[name] = Checkpoint(name)
            load = partial(self._load, checkpoint, spec)
            threading.Thread(target=load, name=f"load {name}", daemon=True).start()
        return self._checkpoints[name]

    def _load(self, checkpoint: Checkpoint, spec: ModelSpec) -> None:
        def progress(done: int, total: int, unit: str) -> None:
            checkpoint.progress = (done, total, unit)
            if self._closing or self._checkpoints.get(checkpoint.name) is not checkpoint:
                raise CheckpointError("nobody waits for this checkpoint any more")

        try:
            runner = self._load_checkpoint(spec.source, spec.precision, spec.adapter, progress)
            arrived = partial(self._arrived, checkpoint, runner)
        except EngineError as error:
            arrived = partial(self._checkpoint_failed, checkpoint, str(error))
        except Exception as error:
            log.exception("loading %s failed", checkpoint.name)
            arrived = partial(self._checkpoint_failed, checkpoint, f"{type(error).__name__}: {error}")
        with contextlib.suppress(EngineDead):
            self._post(arrived)

    def _arrived(self, checkpoint: Checkpoint, runner: Runner) -> None:
        try:
            turn = self._turn_of(runner)
            space = self.memory.add_checkpoint(runner.digest, runner.geometry, runner.context_length, turn)
        except CheckpointError as error:
            return self._checkpoint_failed(checkpoint, str(error))
        with self._lock:
            checkpoint.runner, checkpoint.space = runner, space
            self._loaded[space] = checkpoint
            users = list(checkpoint.users)
        for model in users:
            self._prepare(model)
        self._unload_if_unused(checkpoint)

    def _turn_of(self, runner: Runner) -> Turn | None:
        """That of the checkpoints whose weights it shares, where there are any."""
        turns = (each.space.turn for each in self._loaded.values() if each.runner.decoder is runner.decoder)
        return next(turns, None)

    def _checkpoint_failed(self, checkpoint: Checkpoint, why: str) -> None:
        with self._lock:
            if self._checkpoints.get(checkpoint.name) is checkpoint:
                del self._checkpoints[checkpoint.name]
            users = list(checkpoint.users)
        for model in users:
            self._model_failed(model, why)

    def _prepare(self, model: Model) -> None:
        """Has the system prompt of a model computed, then pinned; with nothing to pin the model is ready at once."""
        if self._models.get(model.spec.name) is not model:
            return
        self.scheduler.shares.set(model.spec.name, model.spec.kv_share)
        try:
            prefix = self._settle(model)
        except EngineError as error:
            return self._model_failed(model, str(error))
        except Exception as error:
            log.exception("the system prompt of %s cannot be encoded", model.spec.name)
            return self._model_failed(model, f"its system prompt cannot be encoded: {type(error).__name__}: {error}")
        if not prefix:
            model.status = "ready"
            return
        model.prefilling = Sequence(model.checkpoint.space, prefix, max_tokens=0, owner=model)
        self.scheduler.add(model.prefilling)

    def _settle(self, model: Model) -> list[int]:
        """Fills in what the checkpoint decides and returns the tokens to pin; none, where they do not fill a block.
        Raises EngineError."""
        runner, space, spec = model.checkpoint.runner, model.checkpoint.space, model.spec
        chat = runner.chat_format(spec.chat_template)
        model.chat_format = chat.name
        model.prefix_ids = chat.system_prefix(spec.system_prompt)
        check_spec(spec, runner)
        model.context_length = self.memory.longest(space, model.limit)
        if model.context_length < min(model.limit, BLOCK_TOKENS):
            raise CheckpointError(
                f"{BLOCK_TOKENS} tokens of {spec.source} do not fit into the pool: raise kv_memory_bytes"
            )
        if len(model.prefix_ids) >= model.context_length:
            raise CheckpointError(
                f"system prompt is {len(model.prefix_ids):,} tokens; {spec.name} allows {model.context_length:,}"
            )
        worth_it = self.memory.share_prefixes and len(model.prefix_ids) >= BLOCK_TOKENS
        return model.prefix_ids if worth_it else []

    def _prompt_computed(self, sequence: Sequence) -> None:
        """Of one that wants nothing else: a system prompt, or a prompt to be scored."""
        model = sequence.owner
        if not isinstance(model, Model):
            return self._end(model.request, "length")
        if pin := self.memory.pin(sequence):
            model.pin, model.prefilling, model.status = pin, None, "ready"
            self._measure_contexts()
        else:
            why = f"no room to keep the {sequence.length:,} tokens of its system prompt: raise kv_memory_bytes"
            self._model_failed(model, why)
        self.scheduler.remove(sequence)

    def _measure_contexts(self) -> None:
        """How long a chat with each model can become, now that more or less of the pool is pinned."""
        with self._lock:
            models = [each for each in self._models.values() if each.context_length and each.checkpoint.runner]
        for model in models:
            model.context_length = self.memory.longest(model.checkpoint.space, model.limit, model.pin)

    def _model_failed(self, model: Model, why: str) -> None:
        log.warning("%s is not served: %s", model.spec.name, why)
        model.status, model.reason, model.prefilling = "failed", why, None

    def _retire(self, model: Model, successor: Model | None = None, why: str = "was removed") -> None:
        """Ends what a model that is gone or replaced has in the engine; its checkpoint goes with its last user."""
        for request in [each for each in self._requests.values() if each.model is model]:
            if successor and successor.checkpoint is model.checkpoint:
                request.model = successor
            else:
                self._end(request, "error", f"the model {model.spec.name} {why}")
        heir = self._models.get(model.spec.name)  # which may have been prepared by now, with a share of its own
        if heir is None or heir.status == "sleeping":
            self.scheduler.shares.set(model.spec.name, 0)
        if model.prefilling:
            self.scheduler.remove(model.prefilling)
            model.prefilling = None
        if model.pin:
            self.memory.unpin(model.pin)
            self._measure_contexts()
        with self._lock:
            model.checkpoint.users.remove(model)
        self._unload_if_unused(model.checkpoint)

    def _unload_if_unused(self, checkpoint: Checkpoint) -> None:
        with self._lock:
            if checkpoint.users:
                return
            if self._checkpoints.get(checkpoint.name) is checkpoint:
                del self._checkpoints[checkpoint.name]
        if self._loaded.pop(checkpoint.space, None):
            self.memory.remove_checkpoint(checkpoint.space)

    # Figures

    def kv(self) -> dict[str, Any]:
        """What the pool holds, and for whom; taken between two steps."""
        return self._ask(lambda: figures.kv(self.memory, self.scheduler, self._models, self._loaded, self._requests))

    def occupancy(self) -> dict[str, Any]:
        """The same without names, beside what contiguous reservation would take; taken between two steps."""

        def now() -> dict[str, Any]:
            models = list(self._models.values())
            return occupancy(self.memory, self.scheduler, models, self.counts, self.page_map.states)

        return self._ask(now)

    def load(self) -> dict[str, Any]:
        return figures.load(self.scheduler, self.memory, self.counts)


def check_spec(spec: ModelSpec, runner: Runner) -> None:
    """Raises CheckpointError where a model asks for more than its checkpoint was made for, or for tokens that it does
    not have."""
    if (spec.context_length or 0) > runner.context_length:
        raise CheckpointError(
            f"context_length is {spec.context_length:,} tokens; {spec.source} allows {runner.context_length:,}",
            param="context_length",
        )
    if wrong := [each for each in spec.sampling.get("stop_token_ids", ()) if not 0 <= each < runner.vocab_size]:
        named = ", ".join(map(str, wrong[:MOST_NAMED]))
        raise CheckpointError(
            f"sampling.stop_token_ids: {named} out of vocabulary; {spec.source} has {runner.vocab_size:,} tokens",
            param="sampling",
        )


def check_share(spec: ModelSpec, others: list[ModelSpec]) -> None:
    """Raises InvalidParameter where models would count on more than there is."""
    taken = sum(other.kv_share for other in others if other.name != spec.name)
    if taken + spec.kv_share > 1 + 1e-9:
        words = f"kv_share is {spec.kv_share:g}; other models count on {taken:g} of the pool, so at most {1 - taken:g}"
        raise InvalidParameter("kv_share", f"{words} is left")


def load_from_source(
    cache_folder: Path,
    backend: Backend,
    dtype: torch.dtype,
    decoders: Decoders,
    source: str,
    precision: str | None,
    adapter: str | None,
    progress: Progress,
) -> Runner:
    adapter_folder = fetch_adapter(adapter, cache_folder, progress) if adapter else None
    folder = fetch(source, cache_folder, progress)
    base = load_checkpoint(
        folder, dtype=dtype, precision=precision, backend=backend, progress=progress, decoders=decoders
    )
    return adapted(base, adapter_folder, progress) if adapter_folder else base


def torch_dtype(name: str, device: torch.device) -> torch.dtype:
    """ "auto" is bfloat16 on a GPU, and on a processor that multiplies it, else float32."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        return torch.bfloat16
    return torch.bfloat16 if {"avx512_bf16", "amx_bf16", "bf16"} & processor_features() else torch.float32


def processor_features() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return set()
    listed = [line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))]
    return set(listed[0]) if listed else set()
