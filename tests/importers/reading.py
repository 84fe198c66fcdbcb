"""What the importer tests share: their inputs, and a reading in one call."""

from io import BytesIO
from pathlib import Path
from typing import TypeVar

from callboard.importers.port import ImportItem, ImportLimits, TranscriptImporter

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "importers"
CORPUS = ROOT.parent / "shared" / "corpus"

T = TypeVar("T")


def read(
    importer: TranscriptImporter, source: bytes, limits: ImportLimits | None = None
) -> list[ImportItem]:
    return list(importer.read(BytesIO(source), limits or ImportLimits()))


def of(items: list[ImportItem], kind: type[T]) -> list[T]:
    return [item for item in items if isinstance(item, kind)]
