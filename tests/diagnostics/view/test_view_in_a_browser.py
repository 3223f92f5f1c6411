"""The page of `verl view` in a real browser: every view, hostile texts, many samples, a damaged
record."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.diagnostics.view.browser import CHROMIUM, Browser
from tests.diagnostics.view.toy_records import HOSTILE, write_record
from tests.trainer.runs import run
from verl.diagnostics.view.answers import Answers
from verl.diagnostics.view.notebook import load_run
from verl.diagnostics.view.page import exported_page
from verl.diagnostics.view.server import ViewServer

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium")

GUESSING = [
    "actor_rollout_ref.rollout.agent.environment.name=number_guessing",
    "actor_rollout_ref.rollout.multi_turn.max_tokens_per_turn=4",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3",
    "data.max_response_length=200",
    "data.max_prompt_length=256",
]
VIEWS = ("overview", "curves", "time", "samples", "group", "trajectory", "plan")
MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": HOSTILE},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": HOSTILE}]},
    {"role": "tool", "content": [{"type": "text", "text": HOSTILE}]},
    {"role": "assistant", "content": HOSTILE},
]


@contextmanager
def serving(*folders: Path) -> Iterator[str]:
    """Serve the page of these runs; gives its address."""
    server = ViewServer(Answers([load_run(folder) for folder in folders]))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server.url
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_every_view_renders_and_hostile_texts_stay_texts(tmp_path: Path):
    write_record(tmp_path / "agents", texts=[HOSTILE], messages=MESSAGES)
    write_record(tmp_path / "toy", steps=3)

    async def look(url: str) -> None:
        async with Browser() as browser:
            await browser.open(url)
            for view in VIEWS:
                await browser.show(view, row=1)
                assert await browser.run("document.querySelector('#main').children.length")
                assert await browser.run("document.querySelector('#problem').hidden"), view
                assert await browser.run("window.hacked === undefined"), view
                assert not await browser.run("document.querySelector('#main img')")

            # the text itself is there, character by character
            await browser.show("trajectory", row=1)
            shown = await browser.run(
                "document.querySelector('.message:last-child pre').textContent"
            )
            assert shown == HOSTILE
            assert browser.problems == []
            assert all(request.startswith(url.split("?")[0]) for request in browser.requests)

    with serving(tmp_path / "agents", tmp_path / "toy") as url:
        asyncio.run(look(url))


def test_real_runs_with_and_without_agents_render(tmp_path: Path):
    assert run(tmp_path / "toy", "actor_rollout_ref.actor.ppo_mini_batch_size=2") == 0
    assert run(tmp_path / "agents", *GUESSING) == 0

    async def look(url: str) -> None:
        async with Browser() as browser:
            await browser.open(url)
            for number in (0, 1):
                for view in VIEWS:
                    await browser.show(view, run=number, row=2)
                    assert await browser.run("document.querySelector('#problem').hidden"), view

            await browser.show("trajectory", run=1, row=2, by="response_mask")
            roles = "[...document.querySelectorAll('.message h3')].map((each) => each.textContent)"
            assert "assistant" in await browser.run(roles)
            await browser.show("curves", run=0)
            charts = "[...document.querySelectorAll('figcaption')].map((each) => each.textContent)"
            assert "critic/score/mean" in await browser.run(charts)
            await browser.show("time", run=0)
            lanes = "[...document.querySelectorAll('.span')].map((each) => each.textContent)"
            assert {"step", "gen", "update_actor"} <= set(await browser.run(lanes))
            assert browser.problems == []

    with serving(tmp_path / "toy", tmp_path / "agents") as url:
        asyncio.run(look(url))


def test_a_file_opens_offline_with_the_same_views(tmp_path: Path):
    write_record(tmp_path / "run", texts=[HOSTILE], messages=MESSAGES)
    page, notes = exported_page(Answers([load_run(tmp_path / "run")]))
    (tmp_path / "out.html").write_text(page, encoding="utf-8")
    assert notes == []

    async def look() -> None:
        async with Browser() as browser:
            await browser.open((tmp_path / "out.html").as_uri())
            for view in VIEWS:
                await browser.show(view, row=5, step=1)
                assert await browser.run("document.querySelector('#problem').hidden"), view
                assert await browser.run("window.hacked === undefined"), view
            assert browser.problems == []
            assert [
                each for each in browser.requests if not each.startswith(("file", "data"))
            ] == []

    asyncio.run(look())


def test_a_hundred_thousand_samples_scroll_and_are_sorted(tmp_path: Path):
    write_record(tmp_path / "run", steps=1, num_rows=100_000)

    async def look(url: str) -> None:
        async with Browser() as browser:
            await browser.open(url)
            await browser.show("samples")
            rows = "document.querySelectorAll('.grid .row:not(.head)').length"
            await browser.until(f"{rows} > 0")
            # Frames per second depend on the machine. Few rows in each frame are what makes them
            # cheap.
            most = await browser.run(
                """(async () => {
                const grid = document.querySelector(".grid");
                let most = 0;
                for (let step = 0; step < 60; step++) {
                  grid.scrollTop += 40000;
                  await new Promise(requestAnimationFrame);
                  await new Promise(requestAnimationFrame);
                  most = Math.max(most, grid.querySelectorAll(".row:not(.head)").length);
                }
                return most;
                })()"""
            )
            assert 0 < most < 100, "only the rows in sight are drawn"
            assert await browser.run("document.querySelector('.grid').scrollTop") > 2_000_000

            await browser.show("samples", sort="score", order="down")
            first = "document.querySelectorAll('.grid .row:not(.head) .cell')[2]"
            await browser.until(f"{first} && {first}.textContent === '3'")
            await browser.show("samples", only="flat")
            status = "document.querySelector('.bar [role=status]').textContent"
            assert await browser.run(status) == "4 of 100000 samples"
            assert browser.problems == []

    with serving(tmp_path / "run") as url:
        asyncio.run(look(url))


def test_keys_choose_a_sample_and_a_token(tmp_path: Path):
    write_record(tmp_path / "run")

    async def look(url: str) -> None:
        async with Browser() as browser:
            await browser.open(url)
            await browser.show("samples")
            await browser.run("document.querySelector('.grid').focus()")
            for _ in range(3):
                await browser.press("ArrowDown")
            selected = "document.querySelector('.grid [aria-selected=true] .cell').textContent"
            await browser.until(f"{selected} === '3'")
            await browser.press("Enter")
            await browser.until("document.getElementById('main').dataset.drawn === 'trajectory'")
            await browser.run("document.querySelector('.strip').focus()")
            await browser.press("ArrowRight")
            await browser.until(
                "document.querySelector('.two [role=status]').textContent.startsWith('token 0')"
            )

            unnamed = await browser.run(
                """[...document.querySelectorAll("button, select, input, [role=grid], [role=img]")]
                .filter((each) => !(each.getAttribute("aria-label") || each.textContent.trim()
                  || (each.labels && [...each.labels].some((label) => label.textContent.trim())))).length"""
            )
            assert unnamed == 0

    with serving(tmp_path / "run") as url:
        asyncio.run(look(url))


def test_a_damaged_record_shows_all_that_is_whole(tmp_path: Path):
    writer = write_record(tmp_path / "run", steps=3)
    samples = writer.folder / "steps" / "3.arrow"
    samples.write_bytes(samples.read_bytes()[:200])
    with (writer.folder / "steps.jsonl").open("a") as file:
        file.write('{"step": 4, "time"\n{"step": "x"}\n[1]\n{"step": 5, "ti')

    async def look(url: str) -> None:
        async with Browser() as browser:
            await browser.open(url)
            await browser.show("overview")
            assert "damaged" in await browser.run("document.querySelector('#main').textContent")
            await browser.show("samples", step=3)
            assert "damaged" in await browser.run("document.querySelector('#problem').textContent")
            await browser.show("samples", step=2)
            assert await browser.run("document.querySelector('#problem').hidden")
            # the server's answer about the damaged step, which the browser logs
            assert all("404" in problem for problem in browser.problems)

    with serving(tmp_path / "run") as url:
        asyncio.run(look(url))
