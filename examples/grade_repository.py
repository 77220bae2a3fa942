"""Grade an agent on the history of your repository: `python grade_repository.py DIR v1..main "my-agent"`"""

import asyncio
import sys
from pathlib import Path

from carrel import tasks

SETTINGS = {
    "environment": {"deps": ["pytest"]},
    "verify": {"command": "python -m pytest -q --junitxml={report}", "timeout": 300},
}


async def main(repository: str, commits: str, command: str, folder: Path = Path(".carrel")) -> tasks.Summary:
    """Make a sample of each commit that changes source and tests, and let the agent solve all of them."""
    dataset = folder / "datasets" / "mine"
    made = await tasks.import_history(Path(repository), commits, dataset, SETTINGS)
    print(f"{len(made.samples)} samples from {commits}")
    samples = [tasks.Dataset.load(dataset).sample(sample_id) for sample_id in made.samples]
    agent = tasks.Agent(command=command)
    summary = await tasks.run_samples(samples, agent, tasks.local_sessions(agent), folder / "runs" / "mine")
    print(f"solved {summary.solved} of {summary.judged}")
    return summary


if __name__ == "__main__":
    repository, commits, command = sys.argv[1:]
    asyncio.run(main(repository, commits, command))
