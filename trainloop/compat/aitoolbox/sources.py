"""AIToolbox's record of an experiment's hyperparameters and source code."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

from trainloop.compat.aitoolbox.saving import ExperimentFolder, write_atomically

__all__ = ["HyperParamSourceReporter"]


class HyperParamSourceReporter:
    """Writes ``hyperparams_list.txt``, the script, and the source folders as a zip into the experiment's folder."""

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        experiment_timestamp: str,
        local_model_result_folder_path: str,
    ) -> None:
        self.experiment_dir_path = ExperimentFolder.create_base_folder(
            project_name, experiment_name, experiment_timestamp, local_model_result_folder_path
        )
        self.file_name = "hyperparams_list.txt"
        self.local_hyperparams_file_path = os.path.join(self.experiment_dir_path, self.file_name)

    def save_hyperparams_to_text_file(self, hyperparams: Mapping[str, Any], sort_names: bool = False) -> str:
        """Write one line per hyperparameter."""
        names = sorted(hyperparams) if sort_names else hyperparams
        text = "".join(f"{name}:\t{hyperparams[name]}\n" for name in names)
        write_atomically(self.local_hyperparams_file_path, lambda file: file.write(text.encode()))
        return self.local_hyperparams_file_path

    def save_experiment_python_file(self, hyperparams: Mapping[str, Any]) -> str | None:
        """Copy the file ``hyperparams['experiment_file_path']``, if it exists."""
        path = hyperparams.get("experiment_file_path")
        if not path or not os.path.isfile(path):  # a notebook
            print(f"experiment_file_path={path!r} in hyperparams is not a file, so it is not copied to the experiment.")
            return None
        return shutil.copyfile(path, os.path.join(self.experiment_dir_path, os.path.basename(path)))

    def save_experiment_source_files(self, hyperparams: Mapping[str, Any]) -> str | None:
        """Zip the folders ``hyperparams['source_dirs_paths']``."""
        folders = hyperparams.get("source_dirs_paths")
        if not isinstance(folders, (list, tuple)) or not folders:
            return None
        copied = os.path.join(self.experiment_dir_path, "source_code")
        for folder in map(os.path.expanduser, folders):
            shutil.copytree(folder, os.path.join(copied, os.path.basename(os.path.normpath(folder))))
        path = shutil.make_archive(copied, "zip", copied)
        shutil.rmtree(copied)
        return path
