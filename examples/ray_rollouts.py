"""Rollouts as Ray tasks, as trainers make them: each has a session of its own through the gateway of a cluster.

CARREL_BASE_URL=http://127.0.0.1:8700/api/v1 CARREL_API_KEY=… python examples/ray_rollouts.py
"""

import os

import ray

from carrel import Client

REPAIR = "sed -i '36s/if/while/;38s/total/product/;39s/return result/result = result/' calc.py"


@ray.remote(num_cpus=0)
def rollout(sample_id: str, seed: int) -> float:
    """Let a policy work on a sample, and return its reward."""
    with Client() as client:
        session = client.sessions.create(dataset="demo", sample_id=sample_id)
        try:
            # Here a model would write the commands; this policy knows one sample.
            if seed % 2:
                client.sessions.execute_command(session_id=session.session_id, command=REPAIR)
            job = client.sessions.verify.start(session_id=session.session_id)
            return float(job.result is not None and job.result.is_success)
        finally:
            client.sessions.close(session_id=session.session_id)


if __name__ == "__main__":
    variables = {name: os.environ[name] for name in ("CARREL_BASE_URL", "CARREL_API_KEY")}
    ray.init(address=os.environ.get("RAY_ADDRESS"), runtime_env={"env_vars": variables})
    rewards = ray.get([rollout.remote("calc-1", seed) for seed in range(8)])
    print("rewards:", rewards)
