"""A task over HTTP, with a verdict. `carrel serve` prints the key for `python web_client.py KEY`"""

import sys

from carrel import Client


def main(api_key: str, base_url: str = "http://127.0.0.1:8765") -> None:
    with Client(base_url=base_url, api_key=api_key) as client:
        sample = client.samples.list(dataset="demo").samples[0]
        with client.sessions.create(dataset=sample.dataset, sample_id=sample.sample_id) as session:
            print(f"session on {sample.dataset}/{sample.sample_id}: {session.status}")
            listed = session.execute_command("ls", on_output=lambda piece: print(piece.text, end=""))
            print(f"exit code {listed.exit_code}")
            session.execute_command("git apply -", stdin=sample.patch)  # where your agent would work
            job = session.verify()
            print(f"verdict: {job.outcome}, score {job.score}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
