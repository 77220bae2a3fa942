"""An agent's work that goes on the next day: each call of this program is one step of the same session.

python continue_later.py            (again and again)"""

import asyncio
import sys

import carrel


async def main(base: str = ".carrel", session_id: str = "report") -> None:
    """Do the next step of the session, which is begun if there is none."""
    try:
        async with carrel.Session.from_base(base, session_id=session_id) as session:
            conversation = await session.converse("A report in steps")
            resumed = session.resumed
            if resumed is None:
                await session.run("steps = []")
            else:
                print(f"continues with {resumed.messages} messages and the variables {', '.join(resumed.variables)}")
            conversation.create_user_message("Go on.")
            result = await session.run(
                "steps.append(len(steps) + 1); open('steps.txt', 'a').write('step '); len(steps)"
            )
            print(f"step {result.value}, files: {', '.join(file.name for file in await session.list_files())}")
    except carrel.SessionBusy as problem:
        print(f"another process works on it: {problem.owner}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
