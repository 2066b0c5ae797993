use std::time::Duration;

use super::*;
use crate::chance::Dice;

fn parse(text: &str) -> Script {
    Script::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

#[test]
fn a_limit_that_an_earlier_one_hides_is_refused() {
    for hidden in [
        "limit packets to 1Gb/s; limit packets to 2Gb/s",
        "limit packets to 1Gb/s; on device rail1: limit packets to 2Gb/s",
        "on device a: limit packets to 2Gb/s; on device a port 2: limit packets to 1Gb/s",
        "on qp 2: limit packets to 1Gb/s; on qp 2: limit send packets to 2Gb/s",
        "limit packets to 1Gb/s after 1s; limit packets to 2Gb/s after 1s for 5s",
        "on device rail1: limit packets to 2Gb/s; on device rail1 qp 1: limit packets to 1Gb/s",
        "limit request packets to 2Gb/s; limit write packets to 1Gb/s",
        "limit request packets to 2Gb/s; limit RC_FLUSH packets to 1Gb/s",
        "limit write packets to 2Gb/s; limit UC_WRITE_ONLY packets to 1Gb/s",
        "limit CNP packets to 2Gb/s; limit CNP packets to 1Gb/s",
        "limit packets to 2Gb/s; on peer ::1: limit packets to 1Gb/s",
        "on qp 1: limit packets to 2Gb/s; on qp 1 peer ::1: limit packets to 1Gb/s",
        "on peer ::ffff:10.0.0.1: limit packets to 2Gb/s; on qp 1 peer 10.0.0.1: limit packets to 1Gb/s",
        "limit 100% of packets to 2Gb/s; limit packets to 1Gb/s",
    ] {
        let error = Script::parse(hidden).unwrap_err().to_string();
        let wanted = "line 1 limits these packets already, and the first rule decides";
        assert!(error.contains(wanted), "{hidden}: {error}");
    }
    for both_hold in [
        "on device rail1: limit packets to 2Gb/s; limit packets to 1Gb/s",
        "on device a port 1: limit packets to 2Gb/s; on device a port 2: limit packets to 1Gb/s",
        "on qp 1: limit packets to 2Gb/s; on qp 2: limit packets to 1Gb/s",
        "limit send packets to 1Gb/s; limit packets to 2Gb/s",
        "limit send packets to 1Gb/s; limit request packets to 2Gb/s",
        "limit request packets to 1Gb/s; limit ack packets to 2Gb/s",
        "limit request packets to 1Gb/s; limit RC_ACK packets to 2Gb/s; limit CNP packets to 3Gb/s",
        "on peer ::1: limit packets to 1Gb/s; limit packets to 2Gb/s",
        "on peer ::1: limit packets to 1Gb/s; on peer ::2: limit packets to 2Gb/s",
        "limit RC_SEND_ONLY packets to 1Gb/s; limit UC_SEND_ONLY packets to 2Gb/s; limit send packets to 3Gb/s",
        "on qp 2: limit packets to 1Gb/s; on device rail1 qp 2: limit packets to 2Gb/s",
        "limit 5% of packets to 1Gb/s; limit packets to 2Gb/s",
        "limit packets to 1Gb/s for 1s; limit packets to 2Gb/s after 1s",
        "limit packets to 1Gb/s; drop packet 5",
    ] {
        assert!(Script::parse(both_hold).is_ok(), "{both_hold}");
    }
}

const TOGETHER: &str = "Several rules may choose a packet. Rules with different actions act on it together: it waits for a rate first, and by a delay behind that. A rule that loses it is the last. Of rules with the same action the first one acts.";

#[test]
fn rules_that_act_together_on_a_packet_are_explained() {
    let says = |text: &str| parse(text).explain(None).iter().any(|line| line == TOGETHER);
    assert!(says("delay packets by 1ms; drop 5% of packets"));
    assert!(says("on qp 1: limit packets to 1Gb/s; on device a: duplicate ack packet 3"));
    assert!(!says("drop packet 1; drop packet 7; down after 1s"));
    assert!(!says("drop packet 1; duplicate received packet 7"), "no packet meets both");
}

#[test]
fn a_queue_pair_has_a_number_with_0x_in_front() {
    let qp = |name: &str| Script::parse(&format!("on qp {name}: fails after 1s"));
    let named = |name| qp(name).unwrap().rules[0].place.qp;
    assert_eq!(named("0x30af32"), Some(QpName::Number(0x30_af32)));
    assert_eq!(named("3190578"), Some(QpName::Nth(3_190_578)));
    assert!(qp("0xff").unwrap().explain(None)[2].contains("the queue pair of number 0x0000ff"));
    assert!(["0", "0x", "0x0", "0x1000000", "0xqp", "30af32"].map(qp).iter().all(Result::is_err));
}

#[test]
fn a_rule_that_an_earlier_one_hides_is_refused() {
    for (hidden, does) in [
        ("drop packets; drop packets", "does so to these packets"),
        ("drop packets; on qp 2: drop send packet 5 after 1s", "does so to these packets"),
        ("drop received ack packets; drop received ack packet 3", "does so to these packets"),
        ("delay packets by 1ms; delay 5% of packets by 2ms", "does so to these packets"),
        ("drop packet 3; drop packet 3", "does so to these packets"),
        ("drop send packets 3 to 9; on qp 2: drop send packets 4 to 9", "does so to these packets"),
        ("send 2 never completes; send 2 completes after 1s", "decides about these sends"),
        (
            "ibv_reg_mr 2 fails with EIO; ibv_reg_mr 2 fails with ENOMEM",
            "decides about these calls",
        ),
        (
            "sends complete after 1ms; send 3 completes with RETRY_EXC_ERR",
            "decides about these sends",
        ),
        (
            "receives never complete; on qp 1: receive 2 never completes",
            "decides about these receives",
        ),
        (
            "ibv_reg_mr fails with EIO; ibv_reg_mr 2 from setup fails with ENOMEM",
            "decides about these calls",
        ),
    ] {
        let error = Script::parse(hidden).unwrap_err().to_string();
        assert!(error.contains(&format!("line 1 {does} already, and")), "{hidden}: {error}");
    }
    for both_hold in [
        "drop packet 1; drop packet 2",
        "drop packets 1 to 3; drop packets 3 to 4",
        "drop packet 3; drop send packet 3",
        "drop packet 3; on peer ::1: drop packet 3",
        "drop packet 3 after 1s; drop packet 3",
        "on qp 1: drop packet 3; drop packet 3",
        "drop packet 3; duplicate packet 3",
        "ibv_reg_mr 2 from setup fails with EIO; ibv_reg_mr 2 from setup fails with EIO",
        "drop packets for 1s; drop packets",
        "drop packets; drop received packets",
        "drop send packets; drop packets",
        "on qp 1: drop packets; drop packets",
        "drop 5% of packets; drop 5% of packets",
        "delay packets by 1ms; drop packet 5",
        "sends complete after 1ms; receives complete after 1ms",
        "on qp 1: sends never complete; send 2 never completes",
        "ibv_reg_mr from setup fails with EIO; ibv_reg_mr 2 fails with ENOMEM",
        "ibv_reg_mr pauses the process for 1s; ibv_reg_mr fails with EIO",
        "ibv_reg_mr fails with EIO; ibv_dereg_mr fails with EIO",
        "down; down",
    ] {
        assert!(Script::parse(both_hold).is_ok(), "{both_hold}");
    }
}

#[test]
fn each_kind_of_rule_is_read_and_explained() {
    let script = parse(
        "# a comment\nseed 7\non device mlx5_3 port 1: down for 2s after 5s\n\
         on qp 3: drop packet 5; drop 0.5% of packets after 1s\n\
         on device mlx5_0 qp 2: delay 10% of packets by 1ms to 5ms\n\
         on qp 2: send 12 never completes\nsend 3 completes with RETRY_EXC_ERR after 10ms\n\
         receives 1 to 2 complete after 200us\nibv_reg_mr 3 fails with ENOMEM\n\
         1% of ibv_post_send fail with EAGAIN\ncorrupt received ack packet 2\n\
         on device mlx5_1: fatal after 1s\non qp 1: fails after 0.5s; fails after 2s\n\
         mark 1% of received packets\non qp 2: rnr received send packets 5 to 9\n\
         on device mlx5_2: limit packets to 2.5Gb/s queue 64 after 1s; limit request packets to 100Mbit/s\n\
         process dies after 3s; process pauses for 2s after 1s\n\
         ibv_post_send 5 kills the process; ibv_reg_mr pauses the process for 10ms\n\
         on device mlx5_0 port 2: event lid_change after 1s; event IBV_EVENT_SM_CHANGE after 2s\n\
         ibv_reg_mr 2 from setup fails with EFAULT; 1% of ibv_post_send from object libucp.so.0 fail with ENOMEM\n\
         ibv_create_qp from my_program+0x1a2b kills the process\n\
         page 3 of region 2 vanishes after 1s for 2s; on device mlx5_1: regions 2 to 3 vanish\n\
         1% of pages of regions vanish; 5% of regions vanish\n\
         drop RC_SEND_ONLY packet 3; corrupt received rc_read_response_last packets 1 to 2\n\
         receive 3 completes with LOC_PROT_ERR; on qp 2: receives complete with WR_FLUSH_ERR after 5ms\n\
         ibv_reg_mr fails with ENOMEM after 1s for 2s; ibv_post_send 5 pauses the process for 10ms after 3s\n\
         1% of sends after 1s for 2s complete with RETRY_EXC_ERR after 10ms; receives for 1s never complete\n\
         on peer 10.0.0.2: drop 1% of packets; on device mlx5_0 qp 2 peer fe80::1: drop received packet 5\n\
         on qp 1: goes to SQE after 1s; go to err after 2s\n\
         on device mlx5_0 port 2: gid 1 removed for 2s after 1s; gid 0 removed\n\
         on device mlx5_1: removed after 3s",
    );
    assert_eq!(script.seed, Some(7));
    assert_eq!(script.explain(Some(9))[0], "Random choices begin with the seed 9.");
    let said = script.explain(None);
    let wanted = [
        "Random choices begin with the seed 7.",
        "The start is the moment at which the process opens its device.",
        "Line 3: 5s after the start port 1 of mlx5_3 goes down, with IBV_EVENT_PORT_ERR: no packet leaves or arrives. 2s later it is up again, with IBV_EVENT_PORT_ACTIVE.",
        "Line 4, rule 1: packet 5 that the process's queue pair 3 sends is lost.",
        "Line 4, rule 2: 0.5% of the packets that each queue pair sends are lost, from 1s after the start on.",
        "Line 5: 10% of the packets that queue pair 2 of mlx5_0 sends are late by 1ms to 5ms.",
        "Line 6: send 12 of the process's queue pair 2 never completes. What is behind it in the queue does not complete either, until the queue pair goes to the error state.",
        "Line 7: send 3 of each queue pair is not sent and completes with IBV_WC_RETRY_EXC_ERR, 10ms after posting at the earliest. The queue pair goes to the error state, or to SQE if it is of UD or UC, as after a failure.",
        "Line 8: receives 1 to 2 of each queue pair complete 200us later. What is behind them in the queue does not complete before.",
        "Line 9: call 3 of ibv_reg_mr fails with ENOMEM.",
        "Line 10: 1% of the calls of ibv_post_send fail with EAGAIN.",
        "Line 11: ACK packet 2 that each queue pair receives is found corrupt, and dropped.",
        "Line 12: 1s after the start mlx5_1 fails for good, with IBV_EVENT_DEVICE_FATAL: its queue pairs go to the error state, and no packet leaves or arrives.",
        "Line 13, rule 1: 500ms after the start the process's queue pair 1 goes to the error state, with IBV_EVENT_QP_FATAL. If it is not there by then, or in RESET, it fails when it is ready to send.",
        "Line 13, rule 2: 2s after the start each queue pair goes to the error state, with IBV_EVENT_QP_FATAL. Those that are made later, or are in RESET at that time, do not.",
        "Line 14: 1% of the packets that each queue pair receives are marked as by a congested network (ECN), so the sender slows down.",
        "Line 15: SEND packets 5 to 9 that the process's queue pair 2 receives are refused as without a receive, where one is needed: the sender gets an RNR NAK, and tries again.",
        "Line 16, rule 1: all packets that the queue pairs of mlx5_2 send together leave one behind the other, at 2.5Gb/s at most, from 1s after the start on. Each waits for its turn; one that finds 64 waiting is lost.",
        "Line 16, rule 2: all request packets that the queue pairs of each port send together leave one behind the other, at 100Mb/s at most. Each waits for its turn; one that finds 1000 of its queue pair waiting is lost.",
        "Line 17, rule 1: 3s after the start the process is killed.",
        "Line 17, rule 2: 1s after the start the process stands still for 2s.",
        "Line 18, rule 1: before call 5 of ibv_post_send the process is killed.",
        "Line 18, rule 2: before each ibv_reg_mr the process stands still for 10ms.",
        "Line 19, rule 1: 1s after the start port 2 of mlx5_0 has IBV_EVENT_LID_CHANGE. Nothing else changes.",
        "Line 19, rule 2: 2s after the start each port of each device has IBV_EVENT_SM_CHANGE. Nothing else changes.",
        "Line 20, rule 1: call 2 of ibv_reg_mr from setup fails with EFAULT.",
        "Line 20, rule 2: 1% of the calls of ibv_post_send from object libucp.so.0 fail with ENOMEM.",
        "Line 21: before each ibv_create_qp from my_program+0x1a2b the process is killed.",
        "Line 22, rule 1: page 3 of region 2 vanishes, from 1s after the start on, for 2s: the device cannot reach this memory, and a request that touches it fails. The program still has it.",
        "Line 22, rule 2: the memory of regions 2 to 3 of mlx5_1 vanishes: the device cannot reach this memory, and a request that touches it fails. The program still has it.",
        "Line 23, rule 1: 1% of the pages of all regions vanish: the device cannot reach this memory, and a request that touches it fails. The program still has it.",
        "Line 23, rule 2: the memory of 5% of the regions vanishes: the device cannot reach this memory, and a request that touches it fails. The program still has it.",
        "Line 24, rule 1: RC_SEND_ONLY packet 3 that each queue pair sends is lost.",
        "Line 24, rule 2: RC_RDMA_READ_RESPONSE_LAST packets 1 to 2 that each queue pair receives are found corrupt, and dropped.",
        "Line 25, rule 1: receive 3 of each queue pair fails with IBV_WC_LOC_PROT_ERR. The queue pair goes to the error state, and the send of a reliable peer fails with IBV_WC_REM_OP_ERR.",
        "Line 25, rule 2: all receives of the process's queue pair 2 fail with IBV_WC_WR_FLUSH_ERR, 5ms later. The queue pair goes to the error state, and the send of a reliable peer fails with IBV_WC_RETRY_EXC_ERR.",
        "Line 26, rule 1: each ibv_reg_mr fails with ENOMEM, from 1s after the start on, for 2s.",
        "Line 26, rule 2: before call 5 of ibv_post_send the process stands still for 10ms, from 3s after the start on.",
        "Line 27, rule 1: 1% of the sends of each queue pair, from 1s after the start on, for 2s, are not sent and complete with IBV_WC_RETRY_EXC_ERR, 10ms after posting at the earliest. The queue pair goes to the error state, or to SQE if it is of UD or UC, as after a failure.",
        "Line 27, rule 2: all receives of each queue pair, for 1s, never complete. What is behind them in the queue does not complete either, until the queue pair goes to the error state.",
        "Line 28, rule 1: 1% of the packets that each queue pair sends to 10.0.0.2 are lost.",
        "Line 28, rule 2: packet 5 that queue pair 2 of mlx5_0 receives from fe80::1 is lost.",
        "Line 29, rule 1: 1s after the start the process's queue pair 1 goes to SQE, and its sends are flushed, if it is of UD or UC. If it is not there by then, or in RESET, it fails when it is ready to send.",
        "Line 29, rule 2: 2s after the start each queue pair goes to the error state, with IBV_EVENT_QP_FATAL. Those that are made later, or are in RESET at that time, do not.",
        "Line 30, rule 1: 1s after the start port 2 of mlx5_0 has no GID 1, with IBV_EVENT_GID_CHANGE: no packet leaves from that address or arrives there, unless another entry of RoCE v2 of the port has the same address. 2s later it is there again.",
        "Line 30, rule 2: at the start each port of each device has no GID 0, with IBV_EVENT_GID_CHANGE: no packet leaves from that address or arrives there, unless another entry of RoCE v2 of the port has the same address. It stays away.",
        "Line 31: 3s after the start mlx5_1 is removed, with IBV_EVENT_DEVICE_FATAL: it fails for good, and ibv_get_device_list does not list it.",
        TOGETHER,
    ];
    assert_eq!(said, wanted);
}

#[test]
fn errors_point_at_the_place() {
    for (text, wanted) in [
        (
            "drop",
            "line 1, column 5: expected \"packets\", or a kind of them: request, send, write, read, atomic, response, ack, or an opcode such as RC_SEND_ONLY, found the end of the rule",
        ),
        (
            "\n\n  drop packt 5",
            "line 3, column 8: expected \"packets\", or a kind of them: request, send, write, read, atomic, response, ack, or an opcode such as RC_SEND_ONLY, found \"packt\"",
        ),
        (
            "drop UD_SEND_FIRST packet 1",
            "line 1, column 6: expected one of the opcodes UD_SEND_ONLY, UD_SEND_ONLY_WITH_IMMEDIATE, found \"UD_SEND_FIRST\"",
        ),
        (
            "rnr received RC_ACKNOWLEDGE packets",
            "line 1, column 14: only send and write packets ask for a receive",
        ),
        ("drop packet 0", "line 1, column 13: a number is from 1 to 18446744073709551615, not 0"),
        ("drop packets 5 to 4", "line 1, column 19: the last number is smaller than the first, 5"),
        (
            "drop packet 5; drop 101% of packets",
            "line 1, column 21: a chance is from 0.0001% to 100%, not 101%",
        ),
        (
            "0.00001% of sends complete after 1s",
            "line 1, column 1: a chance is from 0.0001% to 100%, not 0.00001%",
        ),
        (
            "drop packets 1 to 18446744073709551616",
            "line 1, column 19: a number is from 1 to 18446744073709551615, not 18446744073709551616",
        ),
        (
            "on qp 0: drop packets",
            "line 1, column 7: a number is from 1 to 18446744073709551615, not 0",
        ),
        (
            "down after 1s for 9000000s",
            "line 1, column 19: a time is from 0s to 8640000s, 100 days, not 9000000s",
        ),
        (
            "seed 18446744073709551616",
            "line 1, column 6: a seed is a number from 0 to 18446744073709551615, not 18446744073709551616",
        ),
        ("seed x", "line 1, column 6: expected a number, found \"x\""),
        (
            "on port 1: down",
            "line 1, column 4: expected \"device\", \"qp\" or \"peer\", found \"port\"",
        ),
        (
            "on peer eth0: drop packets",
            "line 1, column 9: expected an IP address, such as 10.0.0.2 or fe80::1, found \"eth0\"",
        ),
        ("on peer 10.0.0.2 drop packets", "line 1, column 18: expected \":\", found \"drop\""),
        ("on peer fe80:: drop packets", "line 1, column 16: expected \":\", found \"drop\""),
        (
            "on peer",
            "line 1, column 8: expected an IP address, such as 10.0.0.2 or fe80::1, found the end of the rule",
        ),
        (
            "on qp 1 peer ::1: fails after 1s",
            "line 1, column 19: a peer is a place for rules about packets: leave \"peer\" out",
        ),
        (
            "on device x port 3: down",
            "line 1, column 18: expected 1 or 2, for no device has more ports, found \"3\"",
        ),
        (
            "on device x port 2: fatal after 1s",
            "line 1, column 21: a device fails with all its ports: leave \"port\" out",
        ),
        ("on qp 3 drop packet 5", "line 1, column 9: expected \":\", found \"drop\""),
        ("on qp 3: down", "line 1, column 10: this is a fault of a port: leave \"qp\" out"),
        (
            "on qp 3: ibv_reg_mr fails with ENOMEM",
            "line 1, column 10: a call is no affair of a device or queue pair: leave \"on ...:\" out",
        ),
        (
            "send 3 fails",
            "line 1, column 8: expected \"after\", \"for\", \"completes\" or \"never completes\", found \"fails\"",
        ),
        (
            "sends after 1s",
            "line 1, column 15: expected \"completes\" or \"never completes\", found the end of the rule",
        ),
        (
            "ibv_reg_mr fails with EIO after 1s after 2s",
            "line 1, column 36: expected \"after\", \"for\", or the end of the rule, found \"after\"",
        ),
        (
            "send 3 completes",
            "line 1, column 17: expected \"with\" or \"after\", found the end of the rule",
        ),
        (
            "send 3 completes after 5",
            "line 1, column 24: expected a time such as 10ms, 0.5s or 200us, found \"5\"",
        ),
        (
            "receive 3 completes with REM_OP_ERR",
            "line 1, column 26: expected one of the statuses of receives LOC_LEN_ERR, LOC_QP_OP_ERR, LOC_PROT_ERR, WR_FLUSH_ERR, LOC_ACCESS_ERR, REM_INV_REQ_ERR, FATAL_ERR, GENERAL_ERR, found \"REM_OP_ERR\"",
        ),
        (
            "corrupt packet 5",
            "line 1, column 9: expected \"received\", for a packet is found corrupt where it arrives, found \"packet\"",
        ),
        (
            "delay received packets by 1ms",
            "line 1, column 7: received packets can be dropped, duplicated, corrupted, marked, or find no receive; the sender's script delays, reorders and limits them",
        ),
        (
            "delay packets by 5ms to 1ms",
            "line 1, column 25: the longest delay is shorter than the shortest",
        ),
        (
            "memory vanishes",
            "line 1, column 1: write \"regions vanish\", \"region 2 vanishes\" or \"page 3 of region 2 vanishes\"",
        ),
        ("page 3 vanishes", "line 1, column 8: expected \"of\", found \"vanishes\""),
        (
            "page 3 of 5% of regions vanish",
            "line 1, column 11: expected \"region\" or \"regions\", found \"5%\"",
        ),
        (
            "region 3 fails",
            "line 1, column 10: expected \"vanishes\" or \"vanish\", found \"fails\"",
        ),
        (
            "on qp 2: regions vanish",
            "line 1, column 10: memory is of a device, with all its ports and queue pairs: leave \"port\" and \"qp\" out",
        ),
        (
            "on device x port 1: region 1 vanishes",
            "line 1, column 21: memory is of a device, with all its ports and queue pairs: leave \"port\" and \"qp\" out",
        ),
        (
            "mark packet 5",
            "line 1, column 6: expected \"received\", for a mark is seen where the packet arrives, found \"packet\"",
        ),
        (
            "rnr packets",
            "line 1, column 5: expected \"received\", for a packet finds no receive where it arrives, found \"packets\"",
        ),
        ("limit packets", "line 1, column 14: expected \"to\", found the end of the rule"),
        (
            "limit packets to 10",
            "line 1, column 18: expected a rate such as 10Gb/s or 500Mb/s, found \"10\"",
        ),
        (
            "limit packets to 0kb/s",
            "line 1, column 18: a rate is from 1kb/s to 1000Gb/s, not 0kb/s",
        ),
        ("limit packets to 1GB/s", "line 1, column 18: a rate is in bits: write 8Gb/s, not 1GB/s"),
        (
            "limit packets to 1Gb/s queue 1001",
            "line 1, column 30: a queue has room for 1 to 1000 packets, not 1001",
        ),
        (
            "rnr received ack packets",
            "line 1, column 14: only send and write packets ask for a receive",
        ),
        ("process", "line 1, column 8: expected \"dies\" or \"pauses\", found the end of the rule"),
        (
            "process pauses after 1s",
            "line 1, column 24: expected \"for\" and a time, found the end of the rule",
        ),
        (
            "on qp 1: process dies after 1s",
            "line 1, column 10: the process is more than a device or queue pair: leave \"on ...:\" out",
        ),
        (
            "ibv_post_send 5",
            "line 1, column 16: expected \"fails\", \"kills\" or \"pauses\", found the end of the rule",
        ),
        ("seed 1\nseed 2", "line 2, column 1: the script has a seed already"),
        (
            "on qp 1: goes to RTS after 1s",
            "line 1, column 18: expected SQE, the error of the send queue, or ERR, found \"RTS\"",
        ),
        ("goes to SQE", "line 1, column 12: expected \"after\", found the end of the rule"),
        (
            "gid",
            "line 1, column 4: expected the place of a GID in its table, from 0, found the end of the rule",
        ),
        ("gid 256 removed", "line 1, column 5: a GID table has the places 0 to 255, not 256"),
        ("gid 1 vanishes", "line 1, column 7: expected \"removed\", found \"vanishes\""),
        (
            "on qp 1: gid 1 removed",
            "line 1, column 10: this is a fault of a port: leave \"qp\" out",
        ),
        ("removed", "line 1, column 8: expected \"after\", found the end of the rule"),
        (
            "on device x port 1: removed after 1s",
            "line 1, column 21: a device fails with all its ports: leave \"port\" out",
        ),
        ("fatal", "line 1, column 6: expected \"after\", found the end of the rule"),
        (
            "on qp 1: event SM_CHANGE after 1s",
            "line 1, column 10: this is a fault of a port: leave \"qp\" out",
        ),
        (
            "event PORT_ERR after 1s",
            "line 1, column 7: expected one of the events LID_CHANGE, PKEY_CHANGE, SM_CHANGE, CLIENT_REREGISTER, GID_CHANGE, found \"PORT_ERR\"",
        ),
        (
            "ibv_reg_mr from fails with EIO",
            "line 1, column 17: expected the name of a function, FILE+0xOFFSET without a directory, or \"object\", found \"fails\"",
        ),
        (
            "ibv_reg_mr from prog+0xyz fails with EIO",
            "line 1, column 17: expected the name of a function, FILE+0xOFFSET without a directory, or \"object\", found \"prog+0xyz\"",
        ),
        (
            "ibv_reg_mr from rails::setup fails with EIO",
            "line 1, column 22: of a name with \"::\" write the last part alone",
        ),
        (
            "ibv_reg_mr from object",
            "line 1, column 23: expected the file of an object without a directory, such as libucp.so.0, found the end of the rule",
        ),
        (
            "ibv_reg_mr 2 from setup",
            "line 1, column 24: expected \"fails\", \"kills\" or \"pauses\", found the end of the rule",
        ),
        ("event SM_CHANGE", "line 1, column 16: expected \"after\", found the end of the rule"),
        (
            "lid changes",
            "line 1, column 1: a LID changes for the program alone: write \"event LID_CHANGE\" and a time",
        ),
        (
            "1% of nothing",
            "line 1, column 7: expected sends, receives, pages, regions, or the name of a call, found \"nothing\"",
        ),
        (
            "\u{e4}\u{e4} \u{1b}",
            "line 1, column 1: expected a fault: drop, duplicate, reorder, corrupt, delay, limit, mark, rnr, send, receive, page, region, down, gid, event, fatal, removed, fails, goes, process, or the name of a call, found \"\u{e4}\u{e4}\"",
        ),
    ] {
        let error = Script::parse(text).map(|_| text).unwrap_err();
        let said = error.to_string();
        assert_eq!(said, wanted, "{text}");
    }
    let error = Script::parse("ibv_reg_mr fails with EXYZ").unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("line 1, column 23: expected one of the error numbers EPERM, "),
        "{error}"
    );
    let error = Script::parse("ibv_frob fails with EIO").unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("line 1, column 1: expected one of the calls ibv_open_device, "),
        "{error}"
    );
    let error = Script::parse("send 1 completes with FROB").unwrap_err();
    assert!(
        error.to_string().contains("column 23: expected one of the statuses LOC_LEN_ERR"),
        "{error}"
    );
}

/// `enum ibv_wc_status`, in the order of its numbers.
const STATUSES_OF_C: [&str; 24] = [
    "SUCCESS",
    "LOC_LEN_ERR",
    "LOC_QP_OP_ERR",
    "LOC_EEC_OP_ERR",
    "LOC_PROT_ERR",
    "WR_FLUSH_ERR",
    "MW_BIND_ERR",
    "BAD_RESP_ERR",
    "LOC_ACCESS_ERR",
    "REM_INV_REQ_ERR",
    "REM_ACCESS_ERR",
    "REM_OP_ERR",
    "RETRY_EXC_ERR",
    "RNR_RETRY_EXC_ERR",
    "LOC_RDD_VIOL_ERR",
    "REM_INV_RD_REQ_ERR",
    "REM_ABORT_ERR",
    "INV_EECN_ERR",
    "INV_EEC_STATE_ERR",
    "FATAL_ERR",
    "RESP_TIMEOUT_ERR",
    "GENERAL_ERR",
    "TM_ERR",
    "TM_RNDV_INCOMPLETE",
];

#[test]
fn each_status_of_c_is_taken_or_refused_with_its_reason() {
    for (number, name) in STATUSES_OF_C.iter().enumerate() {
        for word in [name.to_string(), format!("ibv_wc_{}", name.to_lowercase())] {
            let reason = match *name {
                "SUCCESS" => "is no failure",
                "TM_ERR" | "TM_RNDV_INCOMPLETE" => "is a status of tag matching",
                "LOC_EEC_OP_ERR" | "LOC_RDD_VIOL_ERR" | "REM_INV_RD_REQ_ERR" | "INV_EECN_ERR"
                | "INV_EEC_STATE_ERR" => "is a status of reliable datagrams",
                _ => {
                    let rule = &parse(&format!("send 1 completes with {word}")).rules[0];
                    let Fault::Work { action: WorkAction::Fails(status, _), .. } = rule.fault
                    else {
                        panic!("{word}: {rule:?}");
                    };
                    assert_eq!(usize::from(status.number), number, "{word}");
                    assert_eq!(status.to_string(), format!("IBV_WC_{name}"));
                    assert_eq!(status.is_flush(), *name == "WR_FLUSH_ERR");
                    continue;
                }
            };
            let error = Script::parse(&format!("send 1 completes with {word}")).unwrap_err();
            let wanted = format!("line 1, column 23: {name} {reason}");
            assert!(error.to_string().starts_with(&wanted), "{error}");
        }
    }
}

#[test]
fn an_address_ends_before_the_colon_of_its_place() {
    for (text, ip) in [
        ("on peer 10.0.0.2: drop packets", "10.0.0.2"),
        ("on peer 10.0.0.2 : drop packets", "10.0.0.2"),
        ("on peer ::ffff:10.0.0.2: drop packets", "10.0.0.2"),
        ("on peer fe80::1: drop packets", "fe80::1"),
        ("on peer fe80::1:drop packets", "fe80::1"),
        ("on peer fe80::1 : drop packets", "fe80::1"),
        ("on peer fe80::: drop packets", "fe80::"),
        ("on peer fe80:: : drop packets", "fe80::"),
        ("on peer ::: drop packets", "::"),
        ("on peer 2001:db8:1:2:3:4:5:6: drop packets", "2001:db8:1:2:3:4:5:6"),
    ] {
        let place = &parse(text).rules[0].place;
        assert_eq!(place.peer, Some(ip.parse().unwrap()), "{text}");
    }
}

#[test]
fn an_error_number_has_a_name_or_is_one() {
    for (word, number, said) in [
        ("ENOSYS", 38, "ENOSYS"),
        ("eproto", 71, "EPROTO"),
        ("107", 107, "ENOTCONN"),
        ("EDQUOT", 122, "EDQUOT"),
        ("200", 200, "error 200"),
        ("4095", 4095, "error 4095"),
    ] {
        let rule = &parse(&format!("ibv_dereg_mr 1 fails with {word}")).rules[0];
        let Fault::Call { action: CallAction::Fails(errno), .. } = rule.fault else {
            panic!("{word}: {rule:?}");
        };
        assert_eq!((errno.number, errno.to_string()), (number, said.to_owned()));
        assert_eq!(rule.explain(), format!("call 1 of ibv_dereg_mr fails with {said}."));
    }
    for word in ["0", "4096", "-5", "+5", "99999999999"] {
        let error = Script::parse(&format!("ibv_dereg_mr fails with {word}")).unwrap_err();
        assert!(error.to_string().contains("EDQUOT, or 1 to 4095, found"), "{error}");
    }
}

#[test]
fn a_text_without_its_seed_has_its_rules_in_their_places() {
    let text = "SEED 7; drop packet 1 # seed 8\n  seed 9\n\u{e4}; seed 1;down\n# seed 2";
    assert_eq!(
        Script::without_seed(text),
        "      ; drop packet 1 \n        \n\u{e4};       ;down\n"
    );
    let script = "seed 7\non qp 1: drop packet 5; seed 8";
    assert!(Script::parse(script).is_err());
    let rules = parse(&Script::without_seed(script)).rules;
    assert_eq!((rules.len(), rules[0].line), (1, 2));
}

#[test]
fn places_choose_apart() {
    let chooses = |place: u64, n: u64| Dice::new(1, 0, place).chooses(Which::Chance(500_000), n);
    for shift in 0..3 {
        let alike = (10..1010).filter(|n| chooses(1, *n) == chooses(2, *n - shift)).count();
        assert!((400..600).contains(&alike), "{shift}: {alike}");
    }
}

#[test]
fn a_choice_depends_on_seed_rule_place_and_number_alone() {
    let chosen = |seed, rule, place| -> Vec<u64> {
        let dice = Dice::new(seed, rule, place);
        (1..=10_000).filter(|n| dice.chooses(Which::Chance(10_000), *n)).collect()
    };
    let first = chosen(1, 0, 1);
    assert!((60..140).contains(&first.len()), "{}", first.len());
    assert_eq!(chosen(1, 0, 1), first);
    for other in [chosen(2, 0, 1), chosen(1, 1, 1), chosen(1, 0, 2)] {
        assert_ne!(other, first);
    }
    let dice = Dice::new(1, 0, 0);
    let numbers = Which::Numbers(3, 4);
    assert_eq!((1..6).filter(|n| dice.chooses(numbers, *n)).collect::<Vec<_>>(), [3, 4]);
    let (least, most) = (Duration::from_millis(1), Duration::from_millis(5));
    let times: Vec<_> = (0..100).map(|n| dice.time((least, most), n)).collect();
    assert!(times.iter().all(|time| (least..=most).contains(time)));
    assert!(times.iter().any(|time| *time != times[0]));
    assert_eq!(dice.time((least, least), 3), least);
    let longest = (Duration::ZERO, Duration::MAX);
    assert!(dice.time(longest, 3) <= longest.1);
}

#[test]
fn a_span_has_its_begin_and_not_its_end() {
    let at = Duration::from_millis;
    let span = Span { after: at(5), lasts: Some(at(2)) };
    assert_eq!([4, 5, 6, 7].map(|ms| span.has(at(ms))), [false, true, true, false]);
    let span = Span { after: Duration::MAX, lasts: Some(Duration::MAX) };
    assert!(!span.has(at(1)));
}

/// Words of the language and others, in any order: an error or a script, and an explanation of it.
#[test]
fn no_text_makes_it_panic() {
    let words = [
        "on",
        "device",
        "mlx5_0",
        "qp",
        "3",
        ":",
        "drop",
        "delay",
        "packet",
        "packets",
        "by",
        "1ms",
        "to",
        "9",
        "after",
        "for",
        "2s",
        "down",
        "fatal",
        "fails",
        "goes",
        "SQE",
        "gid",
        "0",
        "removed",
        "send",
        "never",
        "completes",
        "with",
        "REM_OP_ERR",
        "ibv_reg_mr",
        "EIO",
        "1%",
        "of",
        "received",
        "sent",
        "ack",
        "RC_SEND_ONLY",
        "peer",
        "fe80::1",
        "10.0.0.2:",
        "seed",
        "\n",
        ";",
        "#",
        "\u{e9}",
        "99999999999999999999999",
        "0.0000001%",
        "1e9s",
        "...s",
        "s",
        "%",
        "18446744073709551615",
        "\u{2028}",
        "\t",
        "corrupt",
        "limit",
        "queue",
        "10Gb/s",
        "rnr",
        "mark",
        "process",
        "dies",
        "pauses",
        "kills",
        "the",
        "receive",
        "port",
        "1",
        "event",
        "SM_CHANGE",
        "from",
        "page",
        "region",
        "vanish",
        "object",
        "setup",
        "a.so+0x12",
    ];
    let (mut state, mut read) = (1_u64, 0);
    for _ in 0..200_000 {
        let mut text = String::new();
        for _ in 0..(state >> 60) + 1 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            text.push_str(words[(state >> 33) as usize % words.len()]);
            text.push(' ');
        }
        match Script::parse(&text) {
            Ok(script) => read += usize::from(!script.explain(None).is_empty()),
            Err(error) => {
                assert!(error.line > 0 && error.column > 0 && !error.to_string().contains('\n'))
            }
        }
    }
    assert!(read > 1000, "{read}");
}

#[test]
fn the_example_files_are_scripts() {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/faults");
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let script = parse(&std::fs::read_to_string(&path).unwrap());
        assert!(!script.rules.is_empty(), "{}", path.display());
        names.push(path.file_name().unwrap().to_owned());
    }
    names.sort();
    let wanted = [
        "congestion.fault",
        "lumina.fault",
        "memory.fault",
        "mooncake.fault",
        "nbs.fault",
        "rccl.fault",
        "rpma.fault",
        "sites.fault",
    ];
    assert_eq!(names, wanted);
}

#[test]
fn every_rule_of_the_page_is_one() {
    let page = include_str!("../../../docs/recipes/faults.md");
    for line in page.lines().filter_map(|line| line.split_once("--faults '")?.1.split_once('\'')) {
        parse(line.0);
    }
}

#[test]
fn a_rule_is_over_when_its_time_is() {
    let second = std::time::Duration::from_secs;
    for (text, ends_at) in [
        ("down for 2s after 1s", Some(3)),
        ("down after 1s", None),
        ("drop packets for 5s", Some(5)),
        ("drop packet 1", None),
        ("fails after 4s", Some(4)),
        // The queue pair may be made later.
        ("on qp 1: fails after 4s", None),
        ("event SM_CHANGE after 4s", Some(4)),
        ("region 1 vanishes for 2s after 1s", Some(3)),
        ("page 1 of regions vanishes", None),
        ("process pauses for 2s after 3s", Some(3)),
        ("gid 1 removed for 2s after 1s", Some(3)),
        ("removed after 1s", None),
        ("process dies after 3s", None),
        ("fatal after 1s", None),
        ("send 1 never completes", None),
        ("sends after 1s for 3s never complete", Some(4)),
        ("ibv_reg_mr fails with EIO for 2s", Some(2)),
        ("ibv_reg_mr fails with EIO after 2s", None),
    ] {
        let rule = &parse(text).rules[0];
        for age in [0, 1, 2, 3, 4, 5, 1000] {
            let is_over = ends_at.is_some_and(|end| age >= end);
            assert_eq!(rule.is_over(second(age)), is_over, "{text}: {age} s");
        }
    }
}
