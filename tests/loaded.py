"""Modules that the server of processes loads once, because each process would take seconds to (`ranks.server`)."""

import faults  # noqa: F401
import jinja2  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo  # noqa: F401
import transformers.models.bert.modeling_bert  # noqa: F401
from ranks import set_aside

# forks inherit that
set_aside()
