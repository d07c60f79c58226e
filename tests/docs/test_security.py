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
        "admin/test_routes.py::test_outside_loopback_the_client_certificate_counts",
    ],
    "Any client with a certificate from": [
        "admin/test_routes.py::test_outside_loopback_the_client_certificate_counts",
        "base/test_tls.py::test_any_certificate_of_the_authority_gets_through_the_servers_own_too",
        "sources/test_tls.py::test_who_may_name_a_shard",
    ],
    "With `tls_names` set": [
        "sources/test_tls.py::test_a_certificate_with_another_name_than_those_allowed_names_no_shard",
        "admin/test_routes.py::test_outside_loopback_the_client_certificate_counts",
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
        "admin/test_routes.py::test_the_address_for_metrics_serves_them_and_health_to_any_client_and_nothing_else",
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
        "admin/test_endpoint.py::test_from_outside_it_speaks_tls_with_certificates_that_may_be_read_again",
    ],
    "No revocation list": [
        "base/test_tls.py::test_no_revocation_list_is_read",
        "sources/test_tls.py::test_certificates_that_are_read_again_count_for_the_next_connection",
    ],
    "A certificate that cannot be used": [
        "test_server_tls.py::test_a_server_whose_certificate_cannot_be_used_does_not_start",
        "test_server_tls.py::test_sighup_reads_certificates_again_and_a_bad_one_leaves_the_former",
        "test_server_tls.py::test_while_the_certificates_file_system_hangs_shards_are_served_and_one_reading_waits",
        "admin/test_endpoint.py::test_sighup_reads_the_endpoints_certificates_again",
        "admin/test_endpoint.py::test_a_certificate_that_cannot_be_used_ends_the_start",
    ],
    "Under `insecure = true`": [
        "admin/test_routes.py::test_without_tls_any_client_outside_loopback_reads",
        "admin/test_endpoint.py::test_an_insecure_endpoint_needs_no_certificate_of_its_clients_nor_their_names",
    ],
    "A Unix socket is for": [
        "sources/test_mld.py::test_a_unix_socket_serves_is_private_and_goes_with_the_server",
        "admin/test_endpoint.py::test_the_socket_for_steering_is_its_users_alone_and_goes_with_the_server",
        "admin/test_endpoint.py::test_a_unix_socket_as_admin_shows_and_steers",
        "admin/test_routes.py::test_a_unix_socket_is_for_its_user_and_root_whom_the_kernel_names",
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
        "admin/test_routes.py::test_over_tcp_steering_is_refused_with_the_way_to_the_socket",
        "sources/test_tls.py::test_clear_text_is_not_understood_behind_tls",
        "sources/test_mld.py::test_a_unix_socket_serves_is_private_and_goes_with_the_server",
    ],
    "Steering goes only over": [
        "admin/test_routes.py::test_over_tcp_steering_is_refused_with_the_way_to_the_socket",
        "admin/test_routes.py::test_outside_loopback_the_client_certificate_counts",
        "admin/test_routes.py::test_without_tls_any_client_outside_loopback_reads",
        "cli/test_beside_a_server.py::test_a_server_is_seen_and_steered_from_its_start_to_its_end",
    ],
    "On loopback a page of another site": [
        "admin/test_routes.py::test_a_name_that_was_rebound_to_loopback_reads_nothing",
    ],
    "The server's own page": [
        "admin/test_routes.py::test_the_page_may_run_what_stands_in_it_and_nothing_else"
    ],
    "Names and texts that users choose": [
        "admin/test_page_behaviour.py::test_what_users_name_and_write_never_becomes_markup_and_breaks_no_layout"
    ],
    "The number, rate, duration and request size": [
        "admin/test_http_listener.py::test_a_client_that_sends_nothing_or_a_byte_now_and_then_is_disconnected",
        "admin/test_http_listener.py::test_a_body_that_never_ends_costs_its_connection",
        "admin/test_http_listener.py::test_a_handshake_that_never_ends_is_cut",
        "admin/test_http_listener.py::test_beyond_so_many_connections_clients_wait",
        "admin/test_http_listener.py::test_of_many_connections_so_many_are_accepted_a_second",
        "admin/test_http_listener.py::test_a_connection_carries_one_request",
        "admin/test_http_listener.py::test_a_request_has_so_many_bytes",
        "admin/test_http_listener.py::test_a_client_that_reads_nothing_of_a_long_answer_is_disconnected",
        "admin/test_http_listener.py::test_a_reader_of_events_that_reads_nothing_is_disconnected_and_others_go_on",
        "admin/test_routes.py::test_streams_are_bounded",
    ],
    "Malformed input on the listener": [
        "sources/test_mld.py::test_a_peer_that_sends_nonsense_loses_its_own_connection_and_no_other_notices",
        "protocol/test_connection_fuzz.py::test_whatever_the_peer_sends_nothing_raises_and_eof_closes",
    ],
    "When a handshake fails": [
        "sources/test_tls.py::test_without_a_certificate_of_ours_no_shard_is_named_and_the_log_says_once_why",
        "sources/test_tls.py::test_a_client_is_told_by_an_alert_why_it_is_turned_away",
        "kcl/test_bridge.py::test_a_bridge_that_the_server_turns_away_ends_with_a_sentence",
        "admin/test_routes.py::test_the_command_line_says_why_the_endpoint_refuses_a_certificate",
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
        "admin/test_endpoint.py::test_a_secret_of_a_setting_is_in_nothing_that_it_shows",
        "cli/test_beside_a_server.py::test_no_secret_of_a_setting_is_seen_in_log_status_metrics_page_or_process_list",
        "config/test_config.py::test_what_was_given_is_told_without_secrets",
        "config/test_config.py::test_no_value_that_opens_something_is_told",
        "config/test_config.py::test_a_refusal_tells_what_is_wrong_without_secrets",
        "docs/test_security.py::test_no_secret_of_a_setting_is_in_log_status_or_metrics",
        "deadletters/test_destinations.py::test_a_folder_elsewhere_is_reached_at_the_start_or_told",
    ],
    "Each act of steering": [
        "admin/test_endpoint.py::test_it_shows_what_the_server_collects_and_passes_acts_to_it",
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
