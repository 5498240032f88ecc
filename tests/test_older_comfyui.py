"""The second test bed: what runs again on the older of the two ComfyUIs, in a process of its own.

What depends on ComfyUI's version is chosen: how nodes and patches meet a model, its models and VAEs on a tape, the
server, and the page with a front end of that time. Hooks are torch's: of those, one.
"""

import re

from tools import architectures, browser, compatibility_table
from tools.paths import OLDER_COMFYUI

ENGINE = (
    "test_versions.py",
    "test_changed_models.py",
    "test_conds.py",
    "test_unet_packs.py::test_patch_equals_eager",
    "test_unet_packs.py::test_freeu_node",
    "test_unet_packs.py::test_one_replaced_block_is_one_call_of_a_program",
    "test_unet_packs.py::test_a_model_that_was_patched_at_first_recompiles_nothing",
    "test_unet_packs.py::test_an_error_in_a_patch_is_the_users_to_see",
    "test_unet_packs.py::test_another_wrapper",
    "test_unet_packs.py::test_easy_cache_node",
    "test_unet_packs.py::test_a_unet_function_wrapper",
    "test_unet_packs.py::test_an_object_patch_takes_effect",
    "test_unet_packs.py::test_a_hook_takes_effect[middle_block.1.proj_out]",
    "test_unet_packs.py::test_a_hook_without_a_state_is_on_the_tape[middle_block.1.proj_out]",
    "test_workflows_nodes.py::test_node[unet-LatentApplyOperationCFG]",
    "test_workflows_nodes.py::test_context_windows",
    "test_workflows_nodes.py::test_a_patch_added_after_a_run_acts_at_once",
    "test_workflows_batches.py::test_cond_and_uncond_are_split_and_joined_in_mid_run",
    "test_workflows_vae.py::test_a_latent_of_another_model",
    "test_workflows_vae.py::test_a_picture_with_another_number_of_channels",
    "test_vae_shared.py::test_an_interrupt_between_tiles",
    "test_faults.py::test_an_interrupt_passes_at_once[tape.program.Program.run]",  # there an error like any other
    "test_faults.py::test_an_interrupt_passes_at_once[skip.features.SkipRun.call]",
    "test_warm_up.py::test_progress",
    "test_architectures.py::test_every_model_of_comfyui_is_in_the_table",
    "test_tape_families.py::test_recorded_right_and_no_kernel_of_one_size",
    "test_tape_families.py::test_table_of_models_is_current",
    "test_tape_vaes.py::test_recorded_right_and_no_kernel_of_one_size",
    "test_tape_vaes.py::test_table_of_vaes_is_current",
)
SERVER = (
    "test_server.py",
    "test_locales.py::test_help_pages_are_served",
    "test_examples.py::test_links_join_what_fits",
    "test_examples.py::test_only_optional_inputs_are_left_open",
    "test_examples.py::test_the_server_misses_nothing_but_models",
    "test_schemas.py::test_schema",
    "test_nodes.py::test_with_without_with",
    "test_automatic_server.py::test_the_picture_is_that_of_the_nodes",
    "test_node_entries.py::test_a_node_names_its_models_entry_from_the_first_forward_on",
)
# Where there is a Chromium: the nodes appear, the panel opens, lines and tables follow a run. File by file: each has a
# browser and a page.
PAGE = (
    "test_browser.py::test_the_panel_opens_by_keyboard",
    "test_browser.py::test_a_run_is_shown_without_a_reload",
    "test_browser.py::test_nodes_2_0",
    "test_browser.py::test_our_scripts_complain_of_nothing",
    "test_screen.py::test_nodes_are_chinese_and_change_with_the_setting",
    "test_screen.py::test_a_bypassed_node_gives_comfyuis_own_picture",
    "test_screen.py::test_nothing_that_matters_is_hidden_on_a_small_screen",
    "test_collapsed.py",
    "test_compare.py::test_compare_shows_both_times_and_the_difference",
    "test_compare.py::test_compare_runs_what_it_says",
    "test_compare.py::test_preparing_is_shown_with_a_clock_and_cancel_ends_it",
    "test_settings.py::test_every_model_is_accelerated_and_the_page_stays_calm",
    "test_settings.py::test_what_is_said_under_a_node_is_chinese",
    "test_settings.py::test_the_page_is_chinese_and_changes_with_the_language",
)


def test_older_comfyui(in_older_comfyui):
    """In one process, which imports ComfyUI once and starts its server once: none fails, none is left out."""
    # Models whose configurations differ between the two.
    names = [entry.name for entry in architectures.present(OLDER_COMFYUI) if entry.newer]
    assert "Flux" in names and "SD15" not in names
    on_a_tape = {entry.name for entry in compatibility_table.looked_at_again()}
    assert {"Flux", "SDXL", "WAN21_Vace"} <= on_a_tape
    tests = [*ENGINE, *SERVER, *(f"test_architectures.py::test_model_runs[{name}]" for name in names)]
    if browser.find():
        tests += PAGE
    result = in_older_comfyui(*(f"tests/{test}" for test in tests))
    counted = re.search(r"^(\d+) passed(, \d+ warnings?)? in ", result.stdout, re.MULTILINE)
    begins = re.search(r"^=+ (ERRORS|FAILURES) =+$", result.stdout, re.MULTILINE)
    said = result.stdout[begins.start() :][:8000] if begins else result.stdout[-4000:]
    assert result.returncode == 0 and counted, said + result.stderr[-1000:]
    assert int(counted[1]) >= len(tests) + len(on_a_tape)
