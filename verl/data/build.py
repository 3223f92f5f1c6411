"""Build the datasets and samplers of a configuration."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config import DataConfig, ModelConfig, TrainConfig
from verl.config.sft import SFTDataConfig
from verl.data.files import has_split
from verl.data.loader import MapDataset
from verl.data.own_rows import count_rows
from verl.data.pictures import PictureReader
from verl.data.rl_dataset import RLDataset
from verl.data.sampler import Sampler
from verl.data.sft_dataset import SFTDataset
from verl.data.toy import PACKAGED, packaged_files
from verl.models.processor import load_picture_processor
from verl.utils.errors import ConfigError, DataError
from verl.utils.imports import load_extern_type
from verl.utils.logging import logger
from verl.utils.signatures import check_keywords, declares, takes_any_keyword
from verl.utils.user_parts import NamedPart

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_picture_reader(
    model: ModelConfig,
    tokenizer: Any,
    *,
    for_servers: bool = False,
    keeps_images: bool = False,
) -> PictureReader | None:
    """Build the reader of images; None for a model that reads text alone. See `PictureReader`."""
    assert model.path is not None, "the configuration was checked"
    processor = load_picture_processor(
        model.path, tokenizer, trust_remote_code=model.trust_remote_code
    )
    if processor is None:
        return None
    return PictureReader(processor, tokenizer, keeps_images=keeps_images, for_servers=for_servers)


def build_dataset(
    config: TrainConfig,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    split: str,
    pictures: PictureReader | None = None,
) -> MapDataset | None:
    """Build the dataset of `split` ("train" or "val"); None if there is no validation data.

    `pictures` reads images; None: the model reads text alone.
    """
    data = config.data
    files = data_files(data, split)
    if files is None:
        return None
    dataset = _dataset_of(RLDataset, data, files, tokenizer, split, pictures)
    shuffle = data.shuffle if split == "train" else data.validation_shuffle
    limit_rows(dataset, data, split, shuffle=shuffle)
    return dataset


def build_sft_dataset(
    data: SFTDataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    split: str,
    pictures: PictureReader | None = None,
) -> MapDataset | None:
    """Build the dataset of `split` ("train" or "val") of fine-tuning; None if it has no files."""
    files = data.train_files if split == "train" else data.val_files
    if not files:
        return None
    dataset = _dataset_of(SFTDataset, data, files, tokenizer, split, pictures)
    limit_rows(dataset, data, split, shuffle=data.shuffle and split == "train")
    return dataset


def limit_rows(
    dataset: MapDataset, data: DataConfig | SFTDataConfig, split: str, *, shuffle: bool
) -> None:
    """Keep at most `data.train_max_samples` or `data.val_max_samples` rows."""
    key = f"data.{split}_max_samples"
    num_rows = data.train_max_samples if split == "train" else data.val_max_samples
    if num_rows == -1:
        return
    if num_rows < 1:
        raise ConfigError(f"{key} must be at least 1, or -1 for all rows, got {num_rows}.")

    if not isinstance(dataset, (RLDataset, SFTDataset)):
        base = "RLDataset" if isinstance(data, DataConfig) else "SFTDataset"
        raise ConfigError(
            f"{key}={num_rows} needs a dataset that derives from verl.data.{base}, got "
            f"{type(dataset).__name__} of data.custom_cls. Derive it, or set {key}=-1 and let it "
            "read fewer rows."
        )

    before = len(dataset)
    dataset.keep_at_most(num_rows, shuffle=shuffle, seed=data.seed)
    logger.info("%s: %d of %d rows are used.", key, len(dataset), before)


def data_files(data: DataConfig, split: str) -> Any:
    """Return the files of a split; None if there is no validation data.

    Without `val_files`, the toy set validates on itself, and a folder of several splits on its
    validation or test split. Raises DataError if there is no training data.
    """
    if split == "val" and data.val_files:
        return data.val_files
    if data.dataset_name in PACKAGED:
        return packaged_files(data.dataset_name, split)
    if split == "val":
        folder = data.dataset_name
        if folder is not None and has_split(folder, "val"):
            return [folder]
        return None

    if data.train_files:
        return data.train_files
    name = data.dataset_name
    if not name:
        raise DataError(
            "No training data. Set data.train_files (Parquet, JSON lines) or data.dataset_name=toy."
        )

    # A dataset of the user may give the name another meaning.
    if data.custom_cls.path is None and not Path(name).expanduser().exists():
        known = ", ".join(map(repr, PACKAGED))
        raise DataError(
            f"data.dataset_name must be {known}, a file, or a folder written by datasets' "
            f"save_to_disk, found none at '{name}'. The scripts of examples/data_preprocess "
            "make files of data sets on the hub."
        )
    return name


def build_sampler(data: DataConfig, dataset: MapDataset) -> Sampler | None:
    """Build the sampler of `data.sampler`; None leaves the order to seed and shuffle."""
    if data.sampler.class_path is None:
        return None
    kind = load_extern_type(
        data.sampler.class_path, str(data.sampler.class_name), "data.sampler.class_path"
    )
    arguments = {"data_source": dataset, "data_config": data}
    check_keywords(kind, arguments, f"data.sampler.class_name={data.sampler.class_name}")
    made = _made("sampler", data.sampler.class_name, kind, arguments)
    _require_methods(made, ("__len__", "__iter__"), "data.sampler")
    return made


def _dataset_of(
    usual: Callable[..., MapDataset],
    data: DataConfig | SFTDataConfig,
    files: Any,
    tokenizer: "PreTrainedTokenizerBase",
    split: str,
    pictures: PictureReader | None,
) -> MapDataset:
    """Make a data set of the `usual` class, or of the one that `data.custom_cls` names."""
    if data.custom_cls.path is None:
        return usual(files, tokenizer, data, split=split, pictures=pictures)

    kind = load_extern_type(
        str(data.custom_cls.path), str(data.custom_cls.name), "data.custom_cls.path"
    )
    arguments: dict[str, Any] = {"data_files": files, "tokenizer": tokenizer, "config": data}
    if declares(kind, "processor"):
        arguments["processor"] = None if pictures is None else pictures.processor.processor
    if declares(kind, "pictures") or (takes_any_keyword(kind) and pictures is not None):
        arguments["pictures"] = pictures
    if declares(kind, "split"):
        arguments["split"] = split
    check_keywords(kind, arguments, f"data.custom_cls.name={data.custom_cls.name}")
    made = _made("data set", data.custom_cls.name, kind, arguments)
    _require_methods(made, ("__len__", "__getitem__"), "data.custom_cls")
    if count_rows(made) == 0:
        raise DataError(f"data.custom_cls {kind.__name__} has no rows of {files}.")
    return made


def _made(part: str, name: str | None, kind: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call a class of the user. Raise its errors as DataError with its name, file and line."""
    with NamedPart(part, str(name), kind, DataError).naming_errors():
        return kind(**arguments)


def _require_methods(made: Any, methods: tuple[str, ...], key: str) -> None:
    missing = [method for method in methods if not callable(getattr(type(made), method, None))]
    if missing:
        raise DataError(
            f"{key}: {type(made).__name__} must have {' and '.join(methods)}, lacks "
            f"{', '.join(missing)}."
        )
