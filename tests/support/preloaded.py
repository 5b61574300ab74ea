"""What takes seconds to import: a server has done so before it forks worker processes."""

import s3fs  # noqa: F401
import torch  # noqa: F401
import torchdata.nodes  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401

import everplex.cli
import everplex.stages.evaluate
import everplex.stages.loader
import everplex.stages.model
import everplex.stages.plan
import everplex.stages.tokenize
import everplex.worker  # noqa: F401
