"""The base of codeset's models."""

from typing import Any, Literal

import pydantic


class BaseModel(pydantic.BaseModel):
    """An answer of the server: a field that it lacks is None, and one that this model does not know is kept."""

    model_config = pydantic.ConfigDict(extra="allow")

    def to_dict(
        self,
        *,
        mode: Literal["json", "python"] = "python",
        use_api_names: bool = True,
        exclude_unset: bool = True,
        exclude_defaults: bool = False,
        exclude_none: bool = False,
        warnings: bool = True,
    ) -> dict[str, object]:
        """Return the fields that the server sent."""
        return self.model_dump(
            mode=mode,
            by_alias=use_api_names,
            exclude_unset=exclude_unset,
            exclude_defaults=exclude_defaults,
            exclude_none=exclude_none,
            warnings=warnings,
        )

    def to_json(self, *, indent: int | None = 2, **options: Any) -> str:
        """Return the same as text; the options are those of `to_dict`, without `mode`."""
        by_alias, unset = options.pop("use_api_names", True), options.pop("exclude_unset", True)
        return self.model_dump_json(indent=indent, by_alias=by_alias, exclude_unset=unset, **options)
