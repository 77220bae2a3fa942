"""What an agent has at hand: tools, workflows, artifacts, dependencies, and finding them."""
