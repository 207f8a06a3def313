"""Runs coding agents, each on a small task, against `moestro serve` and through `moestro route`.

    python bench/clients/agents.py --work /tmp/agents --json bench/results/serving/agents.json [--only codex]
    python tools/reference_tables.py

The first run installs the agents from npm and PyPI below `--work`: two gigabytes. The server has a checkpoint that
recites texts (`scripted_checkpoint.py`): the chat template asks for a call of the tool by which this agent writes a
file, and after the tool's answer for the text that ends the task. A task passes if the agent ends with status 0 within
its time, and the file has its text.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moestro.config.run_record import run_record

sys.path.insert(0, str(Path(__file__).parents[1]))
from environments import own_environment
from recording import recording
from scripted_checkpoint import write_checkpoint
from shared.results import make_parser, package_version, save
from shared.server import MOESTRO, free_port, moestro, started

TASK = "Write hello into hello.txt"
MODEL, FILE, TEXT, END = "scripted", "hello.txt", "hello", "The file is there. Done."
COMMAND = f"echo {TEXT} > {FILE} && cat {FILE}"
TIMEOUT_S = 240


@dataclass(frozen=True)
class Task:
    """One run of an agent.

    Attributes:
        command: Command line.
        environment: Variables beside those of this process.
        files: Text of files in the agent's directory, by name.
    """

    command: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Agent:
    """An agent.

    Attributes:
        package: Package in its registry.
        registry: `npm` or `pip`.
        task: Makes its run from the directory of its package's commands, the server's address and a home directory.
        before: Command that configures it, if it needs one; made as `task` is.
    """

    name: str
    package: str
    registry: str
    task: Callable[[Path, str, Path], Task]
    before: Callable[[Path, str, Path], Task] | None = None


def codex(bins: Path, url: str, home: Path) -> Task:
    provider = f'{{name = "Moestro", base_url = "{url}/v1", wire_api = "responses"}}'
    settings = (f"model={MODEL}", "model_provider=moestro", f"model_providers.moestro={provider}")
    options = [part for setting in settings for part in ("-c", setting)]
    checks = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return Task([str(bins / "codex"), "exec", *options, *checks, TASK], {"CODEX_HOME": str(home)})


def claude_code(bins: Path, url: str, home: Path) -> Task:
    names = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
    variables = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "x",
        "IS_SANDBOX": "1",
        **dict.fromkeys(names, MODEL),
    }
    command = [str(bins / "claude"), "-p", TASK, "--dangerously-skip-permissions"]
    return Task(command, {**variables, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"})


def opencode(bins: Path, url: str, home: Path) -> Task:
    model = {"name": MODEL, "limit": {"context": 60000, "output": 4000}}
    options = {"baseURL": f"{url}/v1", "apiKey": "x"}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "Moestro", "options": options, "models": {MODEL: model}}
    settings = {"provider": {"moestro": provider}, "permission": "allow"}
    command = [str(bins / "opencode"), "run", "-m", f"moestro/{MODEL}", TASK]
    return Task(command, files={"opencode.json": json.dumps(settings)})


def qwen_code(bins: Path, url: str, home: Path) -> Task:
    variables = {"OPENAI_API_KEY": "x", "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_MODEL": MODEL}
    return Task([str(bins / "qwen"), "--auth-type", "openai", "--yolo", "-p", TASK], variables)


def cline_setup(bins: Path, url: str, home: Path) -> Task:
    options = ["-p", "openai-compatible", "-k", "x", "-m", MODEL, "-b", f"{url}/v1", "--data-dir", str(home / "cline")]
    return Task([str(bins / "cline"), "auth", *options])


def cline(bins: Path, url: str, home: Path) -> Task:
    return Task([str(bins / "cline"), "--data-dir", str(home / "cline"), TASK])


def mini_swe_agent(bins: Path, url: str, home: Path) -> Task:
    variables = {
        "MSWEA_GLOBAL_CONFIG_DIR": str(home), "MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors",
        "OPENAI_API_KEY": "x", "OPENAI_API_BASE": f"{url}/v1",
    }  # fmt: skip
    return Task([str(bins / "mini"), "-y", "-m", f"openai/{MODEL}", "-t", TASK, "--exit-immediately"], variables)


def aider(bins: Path, url: str, home: Path) -> Task:
    options = ["--model", f"openai/{MODEL}", "--edit-format", "whole", "--yes-always", "--no-git", "--no-check-update"]
    quiet = ["--no-show-model-warnings", "--no-analytics", "--message", TASK, FILE]
    return Task([str(bins / "aider"), *options, *quiet], {"OPENAI_API_KEY": "x", "OPENAI_API_BASE": f"{url}/v1"})


# smolagents asks for "required" by itself, whose grammar would overrule what the checkpoint recites.
SMOLAGENTS = """
import sys
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

@tool
def write_text(path: str, text: str) -> str:
    \"\"\"Write a text file.

    Args:
        path: name of the file
        text: its text
    \"\"\"
    open(path, "w").write(text)
    return "written"

model = OpenAIServerModel(sys.argv[1], api_base=sys.argv[2], api_key="x", tool_choice="auto")
print(ToolCallingAgent([write_text], model, stream_outputs=True).run(sys.argv[3]))
"""


def smolagents(bins: Path, url: str, home: Path) -> Task:
    return Task([str(bins / "python"), "task.py", MODEL, f"{url}/v1", TASK], files={"task.py": SMOLAGENTS})


AGENTS = (
    Agent("Codex", "@openai/codex", "npm", codex),
    Agent("Claude Code", "@anthropic-ai/claude-code", "npm", claude_code),
    Agent("opencode", "opencode-ai", "npm", opencode),
    Agent("qwen-code", "@qwen-code/qwen-code", "npm", qwen_code),
    Agent("cline", "cline", "npm", cline, cline_setup),
    Agent("mini-swe-agent", "mini-swe-agent", "pip", mini_swe_agent),
    Agent("aider", "aider-chat", "pip", aider),
    Agent("smolagents", "smolagents[openai]", "pip", smolagents),
)


def called(name: str, **arguments: object) -> str:
    return f"I write the file.\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def scripts(directory: Path) -> dict[str, str]:
    """Return the texts that the checkpoint recites, by name: calls by the name of their tool, and ends of a task."""
    path = str(directory / FILE)
    return {
        "done": END,
        "exec_command": called("exec_command", cmd=COMMAND),
        "Write": called("Write", file_path=FILE, content=f"{TEXT}\n"),
        "write": called("write", filePath=FILE, content=f"{TEXT}\n"),
        "write_file": called("write_file", file_path=path, content=f"{TEXT}\n"),
        "run_commands": called("run_commands", commands=[COMMAND]),
        "write_text": called("write_text", path=FILE, text=f"{TEXT}\n"),
        "bash": called("bash", command=COMMAND),
        "submit": called("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
        "answer": called("final_answer", answer=END),
        "listing": f"{FILE}\n```\n{TEXT}\n```\n",
    }


# Each message leaves its role and length in the prompt. The name of the text follows from the tools and from whether
# one has answered: mini-swe-agent and smolagents end a task by a call, and aider has no tools.
TEMPLATE = """
{#- <tool_call> {"name": ..., "arguments": ...} -#}
{%- for m in messages %}{{- '[' ~ m.role ~ m.content | length ~ ']' }}{%- endfor %}
{%- set offered = (tools or []) | map(attribute='function.name') | list %}
{%- set answered = messages[-1].role == 'tool' or 'Observation' in messages[-1].content %}
{%- set ns = namespace(text='done') %}
{%- if not offered and 'file listing' in messages[0].content %}{%- set ns.text = 'listing' %}
{%- elif answered and offered == ['bash'] %}{%- set ns.text = 'submit' %}
{%- elif answered and 'final_answer' in offered %}{%- set ns.text = 'answer' %}
{%- elif not answered %}
{%- for name in CALLS %}{%- if name in offered %}{%- set ns.text = name %}{%- endif %}{%- endfor %}
{%- endif %}
{{- '@' ~ ns.text ~ '@' }}
"""


def install(agent: Agent, work: Path) -> Path:
    """Return the directory of an agent's commands; the first call installs it."""
    directory = work / agent.name.lower().replace(" ", "-")
    if agent.registry == "npm":
        if not (directory / "node_modules").exists():
            command = ["npm", "install", "--no-audit", "--no-fund", "--silent", "--prefix", directory, agent.package]
            subprocess.run(command, check=True)
        return directory / "node_modules" / ".bin"
    if not (directory / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
        subprocess.run([directory / "bin" / "pip", "install", "--quiet", agent.package], check=True)
        (directory / "complete").touch()
    return directory / "bin"


def version_of(agent: Agent, bins: Path) -> str:
    if agent.registry == "npm":
        return json.loads((bins.parent / agent.package / "package.json").read_text())["version"]
    return package_version(bins / "python", agent.package.partition("[")[0])


def run_task(task: Task, directory: Path, home: Path) -> str:
    """Run a task in `directory`. Return why it failed; an empty text if it passed."""
    for name, text in task.files.items():
        (directory / name).write_text(text)
    environment = own_environment() | {"HOME": str(home), "PWD": str(directory)} | task.environment
    try:
        done = subprocess.run(
            task.command, cwd=directory, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"it did not end within {TIMEOUT_S} s"
    return "" if done.returncode == 0 else f"status {done.returncode}: {(done.stderr or done.stdout)[-400:]}"


def attempt(agent: Agent, bins: Path, url: str, directory: Path) -> str:
    """Let an agent do the task. Return why it failed; an empty text if it passed."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as home:
        for make in (agent.before, agent.task):
            if make is not None and (reason := run_task(make(bins, url, Path(home)), directory, Path(home))):
                return reason
    file = directory / FILE
    text = file.read_text().strip() if file.exists() else None
    return "" if text == TEXT else f"{FILE} has {text!r}"


def record(agent: Agent, bins: Path, url: str, directory: Path, corpus: Path) -> None:
    """Let an agent do the task once more, and store its requests."""
    with recording(url) as (address, requests):
        reason = attempt(agent, bins, address, directory)
    name = f"{agent.name.lower().replace(' ', '-')}-{version_of(agent, bins)}.json"
    (corpus / name).write_text(json.dumps({"agent": agent.name, "requests": requests}, indent=1, ensure_ascii=False))
    print(f"  {len(requests)} requests in {name} {reason}", flush=True)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[], help="names of agents")
    parser.add_argument("--record", type=Path, help="store the agents' requests here, for tests/agents")
    options = parser.parse_args()
    work = options.work.resolve()
    conditions = run_record("measured")
    directory = work / "task"
    names = list(scripts(directory))
    template = TEMPLATE.replace("CALLS", json.dumps(names[1:-3]))
    write_checkpoint(work / "model", scripts(directory), template)
    rows: dict[str, dict[str, object]] = {}
    serve = moestro(free_port(), str(work / "model"), "--served-model-name", MODEL, log=work / "serve.log")
    with serve as server:
        port = free_port()
        route = [MOESTRO, "route", "--engine", server.url, "--admin-port", "0", "--port", str(port)]
        with started(route, port, work / "route.log") as router:
            for agent in AGENTS:
                if options.only and agent.name not in options.only:
                    continue
                bins = install(agent, work)
                places = {"direct": server, "routed": router}
                reasons = {place: attempt(agent, bins, each.url, directory) for place, each in places.items()}
                rows[agent.name] = {"version": version_of(agent, bins)} | {k: v or "passed" for k, v in reasons.items()}
                print(agent.name, rows[agent.name], flush=True)
                if options.record:
                    record(agent, bins, server.url, directory, options.record)
    save(options.json, conditions, {"task": TASK, "agents": rows})


if __name__ == "__main__":
    main()
