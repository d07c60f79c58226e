"""Each sentence of the page's threat model is held by tests: here is which."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from support.certificates import Certificates
from support.pages import DOCS, ROOT
from support.serving import KEEP_EVERYTHING, quick, serving

from mldserver.admin.metrics import exposed

pytestmark = pytest.mark.quick

HELD_BY = {
    "Listener and admin endpoint are on loopback": [
        "config/test_config.py::test_listener_and_admin_endpoint_are_on_loopback_unless_they_are_elsewhere_or_nowhere",
    ],
    "Outside loopback neither starts without": [
        "config/test_config.py::test_outside_loopback_both_sides_show_certificates_unless_it_is_said_in_so_many_words",
        "config/test_config.py::test_on_loopback_and_unix_sockets_certificates_are_not_asked_for",
    ],
    "No version of TLS below 1.2": ["base/test_tls.py::test_older_versions_than_1_2_are_not_spoken"],
    "Without a valid certificate": [
        "base/test_tls.py::test_a_certificate_of_another_authority_never_gets_through",
        "base/test_tls.py::test_a_certificate_that_is_over_never_gets_through",
        "sources/test_tls.py::test_who_may_name_a_shard",
        "sources/test_tls.py::test_without_a_certificate_of_ours_no_shard_is_named_and_the_log_says_once_why",
        "sources/test_tls.py::test_clear_text_is_not_understood_behind_tls",
        "admin/test_endpoint_access.py::test_from_outside_it_is_the_client_certificate_that_counts",
    ],
    "Any client with a certificate from": [
        "admin/test_access.py::test_each_client_may_do_what_the_table_says_and_nothing_else",
        "admin/test_endpoint_access.py::test_from_outside_it_is_the_client_certificate_that_counts",
        "base/test_tls.py::test_any_certificate_of_the_authority_gets_through_the_servers_own_too",
        "sources/test_tls.py::test_who_may_name_a_shard",
    ],
    "With `tls_names` set": [
        "sources/test_tls.py::test_a_certificate_with_another_name_than_those_allowed_names_no_shard",
        "admin/test_access.py::test_each_client_may_do_what_the_table_says_and_nothing_else",
        "test_server_tls.py::test_a_server_takes_the_shards_and_the_names_that_its_settings_allow",
    ],
    "If `listen_secret` is set": [
        "sources/test_secret.py::test_a_daemon_behind_a_bridge_with_the_secret_is_served",
        "sources/test_secret.py::test_a_peer_without_the_secret_names_no_shard_and_the_log_says_so_once_a_minute",
        "base/test_secret.py::test_another_secret_or_none_is_refused_whatever_the_chunks_are",
    ],
    "The secret is in a file": [
        "base/test_secret.py::test_the_secret_is_one_word_in_a_file_that_others_cannot_read",
        "kcl/test_bridge.py::test_a_secret_is_shown_before_the_daemons_first_line",
        "kcl/test_command.py::test_it_runs_the_daemon_with_its_files_and_stops_it_in_order",
        "sources/test_secret.py::test_a_server_without_a_secret_takes_bridges_that_show_one",
    ],
    "Any client that reaches `metrics_listen`": [
        "admin/test_endpoint_keeper.py::test_the_address_for_metrics_serves_them_and_health_to_any_client_and_nothing_else",
    ],
    "A daemon that names a shard": [
        "sources/test_tls.py::test_only_shards_that_are_allowed_are_taken",
        "coordinator/test_coordinator_shards.py::test_a_name_that_the_stream_does_not_list_is_refused_and_holds_no_window",
    ],
    "Bridges, `mldserver kcl` and terminal commands": [
        "base/test_tls.py::test_a_client_refuses_a_server_of_another_authority_or_another_name",
        "kcl/test_bridge.py::test_a_bridge_says_nothing_to_a_server_that_is_not_the_right_one",
        "kcl/test_supervisor.py::test_a_server_whose_certificate_is_not_the_right_one_is_told_of_and_not_waited_for",
        "admin/test_http_client.py::test_where_one_side_proves_nothing_neither_is_told_a_word",
    ],
    "After the server has read certificates again": [
        "base/test_tls.py::test_what_is_read_again_counts_for_the_next_handshake_and_no_session_outlives_it",
        "sources/test_tls.py::test_certificates_that_are_read_again_count_for_the_next_connection",
        "admin/test_endpoint_keeper.py::test_from_outside_it_speaks_tls_and_reads_certificates_again",
    ],
    "No revocation list": [
        "base/test_tls.py::test_no_revocation_list_is_read",
        "sources/test_tls.py::test_certificates_that_are_read_again_count_for_the_next_connection",
    ],
    "A certificate that cannot be used": [
        "test_server_tls.py::test_a_server_whose_certificate_cannot_be_used_does_not_start",
        "test_server_tls.py::test_sighup_reads_certificates_again_and_a_bad_one_leaves_the_former",
        "test_server_tls.py::test_while_the_certificates_file_system_hangs_shards_are_served_and_one_reading_waits",
        "admin/test_endpoint_keeper.py::test_a_certificate_that_cannot_be_used_ends_the_start",
    ],
    "Under `insecure = true`": [
        "admin/test_endpoint_access.py::test_plain_http_from_outside_may_only_be_read_and_only_if_that_was_said",
        "admin/test_access.py::test_nobody_steers_from_outside_without_a_certificate_whatever_the_settings",
    ],
    "A Unix socket is for": [
        "sources/test_mld.py::test_a_unix_socket_serves_is_private_and_goes_with_the_server",
        "admin/test_endpoint_keeper.py::test_a_unix_socket_is_for_its_user_alone_and_goes_with_the_server",
        "admin/test_endpoint_access.py::test_a_unix_socket_is_its_users_who_is_known_by_the_kernel",
        "admin/test_endpoint_access.py::test_another_user_of_the_host_is_told_nothing_on_the_unix_socket",
    ],
    "Ledger, segments, staged outputs": [
        "test_server.py::test_other_users_read_published_windows_and_nothing_else_of_the_folder",
        "coordinator/test_backup.py::test_a_backup_that_is_whole_is_restored",
    ],
    "An existing folder keeps": [
        "test_server.py::test_other_users_read_published_windows_and_nothing_else_of_the_folder",
        "test_server.py::test_a_settings_file_with_passwords_that_others_can_read_is_told",
    ],
    "Published windows and late rows": [
        "spark/test_session.py::test_local_files_of_spark_follow_the_umask_of_the_server",
        "test_server.py::test_other_users_read_published_windows_and_nothing_else_of_the_folder",
    ],
    "On loopback any user of the host": [
        "admin/test_endpoint_access.py::test_over_loopback_it_is_the_token_that_counts",
        "sources/test_tls.py::test_clear_text_is_not_understood_behind_tls",
        "sources/test_mld.py::test_a_unix_socket_serves_is_private_and_goes_with_the_server",
    ],
    "Steering over loopback": [
        "admin/test_endpoint_access.py::test_the_token_steers_over_loopback_and_nothing_else_does"
    ],
    "The token is random": [
        "admin/test_access.py::test_a_token_is_made_once_at_random_and_for_its_user_alone",
        "admin/test_access.py::test_a_token_that_others_may_read_is_refused_and_the_servers_own_gives_way_to_a_new_one",
        "admin/test_access.py::test_another_users_file_is_no_token_and_stays",
        "admin/test_access.py::test_a_token_needs_no_hard_links_and_no_name_that_another_server_may_have",
        "admin/test_endpoint_access.py::test_a_token_that_is_written_anew_counts_at_once_and_one_that_others_may_read_never",
    ],
    "If the server cannot keep other users from": [
        "admin/test_access.py::test_where_no_file_can_be_kept_from_others_that_is_told",
        "admin/test_endpoint_keeper.py::test_a_token_file_that_the_server_made_never_ends_a_start",
        "admin/test_endpoint_keeper.py::test_a_token_file_that_was_given_is_not_made",
    ],
    "Terminal commands send the token": [
        "admin/test_http_client.py::test_who_reads_shows_the_token_only_to_a_server_that_wants_it",
        "admin/test_http_client.py::test_a_stranger_who_has_taken_the_port_is_not_shown_the_token",
        "admin/test_http_client.py::test_the_kernels_tables_tell_whose_a_port_is",
        "admin/test_http_client.py::test_a_real_ports_user_is_told_before_and_after_the_accept",
    ],
    "Pages of other sites": [
        "admin/test_access.py::test_on_loopback_any_other_host_is_refused_as_a_name_that_was_rebound",
        "admin/test_access.py::test_a_page_of_another_site_may_not_ask",
        "admin/test_endpoint_access.py::test_a_page_of_another_site_and_a_name_that_was_rebound_get_nothing",
    ],
    "Under `insecure = true` outside loopback": [
        "admin/test_access.py::test_under_insecure_a_page_under_a_rebound_name_may_read_as_anyone_may_and_never_steer",
    ],
    "The server's own page": [
        "admin/test_endpoint.py::test_the_page_may_run_what_stands_in_it_and_nothing_else"
    ],
    "Names and texts that users choose": [
        "admin/test_page_behaviour.py::test_what_users_name_and_write_never_becomes_markup_and_breaks_no_layout"
    ],
    "A separate process serves HTTP clients": [
        "admin/test_endpoint_keeper.py::test_a_process_that_is_killed_has_a_successor_on_the_same_address_and_acts_go_on",
        "admin/test_endpoint_floods.py::test_who_sends_nothing_or_a_byte_now_and_then_is_cut",
        "admin/test_endpoint_floods.py::test_of_too_many_connections_the_oldest_gives_way",
        "admin/test_endpoint_floods.py::test_what_is_too_long_is_refused",
        "admin/test_endpoint_floods.py::test_who_asks_for_much_and_reads_nothing_is_cut",
        "admin/test_endpoint_floods.py::test_streams_and_acts_are_bounded",
    ],
    "Malformed input on the listener": [
        "sources/test_mld.py::test_a_peer_that_sends_nonsense_loses_its_own_connection_and_no_other_notices",
        "protocol/test_connection_fuzz.py::test_whatever_the_peer_sends_nothing_raises_and_eof_closes",
    ],
    "When a handshake fails": [
        "sources/test_tls.py::test_without_a_certificate_of_ours_no_shard_is_named_and_the_log_says_once_why",
        "sources/test_tls.py::test_a_client_is_told_by_an_alert_why_it_is_turned_away",
        "kcl/test_bridge.py::test_a_bridge_that_the_server_turns_away_ends_with_a_sentence",
        "admin/test_endpoint_access.py::test_the_command_line_says_why_the_endpoint_refuses_a_certificate",
    ],
    "A handshake that does not end": [
        "sources/test_tls.py::test_a_handshake_that_never_ends_gives_its_slot_back_in_time",
        "sources/test_tls.py::test_a_stop_does_not_wait_for_handshakes",
    ],
    "A hundred handshakes": ["sources/test_tls.py::test_a_hundred_handshakes_begin_in_a_second_at_most"],
    "Memory for unread messages": [
        "sources/test_mld.py::test_unread_lines_beyond_the_budget_wait_until_the_oldest_is_complete"
    ],
    "Beyond `connection_limit`": [
        "sources/test_mld.py::test_at_the_limit_peers_wait_in_the_kernels_queue_until_a_place_is_free"
    ],
    "Unless `log_error_messages`": [
        "admin/test_gather.py::test_by_default_neither_log_nor_status_quotes_what_errors_say",
        "runtime/test_inline_control.py::test_a_log_without_messages_quotes_no_record",
        "jobs/test_runner.py::test_without_messages_log_and_status_quote_no_row_and_the_ledger_does",
        "spark/test_spark_log.py::test_sparks_log_can_be_told_without_what_errors_say",
    ],
    "Passwords in URLs": [
        "config/test_secrets.py::test_no_setting_is_shown_with_its_secret",
        "cli/test_beside_a_server.py::test_no_secret_of_a_setting_is_seen_in_log_status_metrics_page_or_process_list",
        "config/test_config.py::test_what_was_given_is_told_without_secrets",
        "config/test_config.py::test_no_value_that_opens_something_is_told",
        "config/test_config.py::test_a_refusal_tells_what_is_wrong_without_secrets",
        "docs/test_security.py::test_no_secret_of_a_setting_is_in_log_status_or_metrics",
        "deadletters/test_destinations.py::test_a_folder_elsewhere_is_reached_at_the_start_or_told",
    ],
    "The endpoint's process": [
        "admin/test_endpoint_keeper.py::test_its_process_gives_way_and_knows_no_secret_of_the_environment"
    ],
    "Each act of steering": [
        "admin/test_endpoint_keeper.py::test_it_shows_each_second_what_the_server_tells_and_asks_it_to_act",
        "admin/test_endpoint_access.py::test_who_steers_from_outside_is_named_by_the_certificate",
    ],
}
"""By how a sentence begins: its tests, as paths from the folder of tests."""


def test_each_sentence_of_the_threat_model_has_its_tests_and_each_test_its_sentence() -> None:
    _, _, model = (DOCS / "security.md").read_text("utf-8").partition("\n## Threat model\n")
    sentences = re.findall(r"^\* (.+)$", model, re.MULTILINE)
    for sentence in sentences:
        assert [start for start in HELD_BY if sentence.startswith(start)], sentence
        assert re.search(r"\. [A-Z]", sentence) is None, f"two sentences in one: {sentence}"
    assert len(sentences) == len(HELD_BY)
    prose = [line for line in model.splitlines() if line and not line.startswith(("* ", "### "))]
    assert prose == ["`tests/docs/test_security.py` names the tests of each sentence below."]


@cache
def named_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("start", HELD_BY)
def test_the_tests_that_hold_a_sentence_are_there(start: str) -> None:
    for named in HELD_BY[start]:
        file, _, name = named.partition("::")
        assert name in named_in(file), named


async def test_no_secret_of_a_setting_is_in_log_status_or_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[dict[str, object]]
) -> None:
    (tmp_path / "kept_in_secret.py").write_text(KEEP_EVERYTHING)
    monkeypatch.syspath_prepend(tmp_path)
    files = Certificates(tmp_path)
    key = files.client.read_text().partition("PRIVATE KEY-----\n")[2].partition("\n")[0]
    settings = quick(
        tmp_path / "out",
        "kept_in_secret",
        spark_conf={"spark.hadoop.fs.s3a.secret.key": "hush"},
        spark_master="sc://h:1/;token=hush",
        sink_options={"password": "hush"},
        tls_certificate=files.client,
    )
    names = ("spark_conf", "spark_master", "sink_options", "tls_certificate")
    async with serving(replace(settings, origins=dict.fromkeys(names, "here"))) as server:
        document = server.document()
        assert document is not None
        shown = f"{document}{exposed(document, 'text/plain')}{logged}"
        assert all(f"'{name}': " in shown for name in names), "they are told, but for what is secret"
        assert "hush" not in shown
        assert key not in shown
