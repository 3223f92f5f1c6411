"""The steps of the embedded engine: what they start and feed, and the tokens that they bring."""

import numpy as np
import torch

from verl.rollout.embedded.run import Run
from verl.rollout.embedded.runner import Draws, ModelRunner
from verl.rollout.embedded.samples import Admission, Group, IntArray, Prefill
from verl.rollout.embedded.scheduler import Scheduler
from verl.rollout.local import not_finite
from verl.rollout.types import Completion


class Steps:
    """Launches steps on a runner, and collects their tokens when they arrive."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def launch(self, run: Run) -> list[Draws]:
        """Start samples, or launch the next steps of the running ones.

        Launches nothing where tokens in flight must come back first.
        """
        scheduler = run.scheduler
        # A step gives neither the routes of several tokens nor a hidden state.
        step_rows = 0 if scheduler.routes is not None else self._runner.spare_rows
        admission = scheduler.admit(step_rows)
        if admission is None:
            return self._go_on(run)

        for prefill in admission.prefills:
            run.counts["prefill_tokens"] += len(prefill.token_ids) - prefill.cached
            run.counts["cached_tokens"] += prefill.cached
        slots = np.array(admission.slots, np.int64)
        if admission.fits_step(step_rows):
            return self._join(run, slots, admission)

        draws = self._runner.start(scheduler, slots, self._prefill(scheduler, admission))
        scheduler.launch(slots, fed=0)
        scheduler.release_started_prompts()
        return [draws]

    def _go_on(self, run: Run) -> list[Draws]:
        """Launch the next steps of the running samples, or one step that verifies drafts."""
        scheduler = run.scheduler
        assert scheduler.running.size, (
            f"{len(scheduler.waiting)} samples wait, nothing runs, and none can start"
        )
        if run.drafts is None:
            steps = scheduler.steps_ahead(self._runner.steps_at_once(scheduler))
        else:
            drafted = run.drafts.tokens_a_sample(len(scheduler.unfinished))
            steps = scheduler.steps_with_pages(1 + drafted)
            if steps > 1 and run.flight:
                return []  # drafts continue tokens that are still on the device

        complete = self._prepare(run, steps, may_preempt=not run.flight)
        slots = scheduler.unfinished
        if not complete or slots.size == 0:
            return []

        counts = run.counts
        if run.drafts is not None and steps > 1:
            drafts = run.drafts.propose(scheduler, slots, steps - 1)
            launched = self._runner.verify(scheduler, slots, drafts)
            counts["decode_steps"] += 1
            counts["drafted_tokens"] += sum(map(len, drafts))
            counts["accepted_tokens"] += sum(len(draws.slots) for draws in launched[1:])
        else:
            launched = self._runner.decode(scheduler, slots, steps)
            counts["decode_steps"] += steps

        for draws in launched:
            scheduler.launch(draws.slots, fed=1)
        return launched

    def _prepare(self, run: Run, steps: int, *, may_preempt: bool) -> bool:
        """Give unfinished slots pages for `steps` tokens; see `Scheduler.prepare_decode`."""
        copies, complete = run.scheduler.prepare_decode(steps, may_preempt=may_preempt)
        if copies:
            self._runner.copy_pages(copies)
            run.counts["copied_pages"] += len(copies)
        return complete

    def _join(self, run: Run, new: IntArray, admission: Admission) -> list[Draws]:
        """Take one step of the running samples, and start those in the slots `new` within it.

        A prefill would cost another pass over the weights.
        """
        scheduler = run.scheduler
        # Before pages are prepared: only the samples write to them from now on.
        scheduler.release_started_prompts()
        complete = self._prepare(run, 1, may_preempt=False)
        slots = scheduler.unfinished if complete else new
        prefills = dict(zip(new.tolist(), admission.prefills))
        draws = self._runner.decode_and_extend(scheduler, slots, prefills)
        scheduler.launch(np.setdiff1d(slots, new), fed=1)
        scheduler.launch(new, fed=0)
        run.counts["decode_steps"] += 1
        return [draws]

    def _prefill(self, scheduler: Scheduler, admission: Admission) -> torch.Tensor:
        """Compute the prefills of an admission.

        Returns the hidden states (b, H) that the admitted slots draw from.
        """
        for cached in (False, True):
            prefills = [each for each in admission.prefills if (each.cached > 0) == cached]
            if not prefills:
                continue

            sequences = [prefill.token_ids for prefill in prefills]
            pages = [prefill.pages for prefill in prefills]
            groups = [prefill.group for prefill in prefills]
            if cached:
                starts = [prefill.cached for prefill in prefills]
                shifts = [group.shift for group in groups]
                states = self._runner.extend(sequences, pages, starts, shifts)
            else:
                pictured = [(len(group.prompt), group.pictures) for group in groups]
                states = self._runner.prefill(sequences, pages, pictured)

            for prefill, state in zip(prefills, states):
                prefill.hidden = state
                if prefill.is_prompt:
                    prefill.group.hidden = state

        rows = []
        distinct: list[torch.Tensor] = []
        places: dict[Prefill | Group, int] = {}  # samples of a prompt draw from the same state
        for slot in admission.slots:
            source = admission.resumed.get(slot) or scheduler.group_of(slot)
            if source not in places:
                assert source.hidden is not None, "computed above, or for an earlier admission"
                places[source] = len(distinct)
                distinct.append(source.hidden)
            rows.append(places[source])
        index = self._runner.to_device(np.array(rows, np.int64))
        return torch.stack(distinct).index_select(0, index)

    def collect(self, run: Run) -> list[Completion]:
        """Record the oldest launched tokens, and end the samples that are done."""
        scheduler = run.scheduler
        draws = run.flight.popleft()
        tokens, log_probs = draws.result()
        # A sample that ended at the previous draw has left its slot, but the device has drawn once
        # more for it.
        current = scheduler.epoch[draws.slots] == draws.epochs
        slots = draws.slots[current]
        tokens = tokens[current]
        log_probs = log_probs[current]
        routes = None if draws.routes is None else draws.routes[current]
        run.counts["generated_tokens"] += len(slots)
        if not np.isfinite(log_probs).all():
            odd = np.flatnonzero(~np.isfinite(log_probs))
            first = int(slots[odd[0]])
            raise not_finite(scheduler.sample_id_of(first))

        drawn = scheduler.record(slots, tokens, log_probs, routes)
        stopped = run.rule.ends(tokens)
        if run.rule.strings:
            for row in np.flatnonzero(~stopped).tolist():
                so_far = scheduler.token_ids[slots[row], : drawn[row]]
                stopped[row] = run.rule.completes_string(so_far)

        done = stopped | (drawn >= scheduler.limits[slots])
        completions: list[Completion] = []
        if done.any():
            if run.drafts is not None:
                for slot, count in zip(slots[done].tolist(), drawn[done]):
                    ids = scheduler.token_ids[slot, :count].tolist()
                    run.drafts.keep(scheduler.group_of(slot), scheduler.sample_id_of(slot), ids)
            stopped_slots = set(slots[stopped].tolist())
            completions = scheduler.finish(slots[done].tolist(), stopped_slots)
        run.progress.note(scheduler, len(completions), run.counts["generated_tokens"])
        return completions
