"""The newer name of `skills`."""

from carrel.compat.py_code_mode import skills
from carrel.compat.py_code_mode.skills import PythonSkill, SkillLibrary, SkillMetadata, SkillParameter

__all__ = ["PythonSkill", "SkillLibrary", "SkillMetadata", "SkillParameter"]

__getattr__ = skills.__getattr__
