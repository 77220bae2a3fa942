"""Judge what was changed in a workspace: apply the changes in a fresh one and run the sample's tests there."""
