//! Two hosts, which are network namespaces.

use anyverbs_testing::Stopwatch;
use std::process::Command;
use std::time::{Duration, Instant};

use anyverbs_proto::cm::event::{CmEvent, Disconnected};
use anyverbs_proto::cm::message::code::RejReason;

use super::{Peer, ROLE, TIMEOUT, connect, disconnect, establish, event, gsi, ip, of};

fn run(arguments: &str) -> bool {
    let mut words = arguments.split(' ');
    Command::new(words.next().unwrap()).args(words).status().unwrap().success()
}

/// Two hosts, in namespaces of their own: this process and more on one, others on the second.
#[test]
fn two_hosts() {
    if !anyverbs_testing::unshare_or_skip() {
        return;
    }
    let output = Command::new("unshare")
        .arg("-Urn")
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "gsi::tests::hosts::on_two_hosts", "--nocapture", "--test-threads=1"])
        .env(ROLE, "hosts")
        // One port for all processes of both hosts, for any user that runs this test.
        .envs([
            ("ANYVERBS_REGISTRY", "hosts"),
            ("ANYVERBS_INTERFACES", ""),
            ("ANYVERBS_UDP_PORT", "4791"),
        ])
        .output()
        .unwrap();
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.contains("1 passed"), "{out}\n{err}");
    println!("{out}");
}

/// Not a test by itself: the code of [`two_hosts`].
#[test]
fn on_two_hosts() {
    if std::env::var(ROLE).as_deref() != Ok("hosts") {
        return;
    }
    let exe = std::env::current_exe().unwrap();
    let mut other_host = Command::new("unshare");
    other_host.arg("-n").arg(&exe);
    let mut first = Peer::run(other_host, "later");
    assert_eq!(first.hear(), "@ waits");
    let there = first.child.id();
    let enter = format!("nsenter -n -t {there} ");
    for (ns, commands) in [
        ("", format!("ip link add av0 type veth peer name av1 netns {there}")),
        ("", "ip link set lo up;ip addr add 10.77.0.1/24 dev av0;ip addr add fd77::1/64 dev av0 nodad;ip addr add fe80::77:1/64 dev av0 nodad;ip link set av0 addrgenmode none;ip link set av0 up".into()),
        (&enter, "ip link set lo up;ip addr add 10.77.0.2/24 dev av1;ip addr add fd77::2/64 dev av1 nodad;ip addr add fe80::77:2/64 dev av1 nodad;ip link set av1 addrgenmode none;ip link set av1 up".into()),
    ] {
        for command in commands.split(';') {
            assert!(run(&format!("{ns}{command}")), "{ns}{command}");
        }
    }
    first.say("go");
    assert!(first.hear().starts_with("@ slot"));
    let mut there: Vec<_> = (0..4)
        .map(|_| {
            let mut command = Command::new("nsenter");
            command.args(["-n", "-t", &there.to_string()]).arg(&exe);
            let mut peer = Peer::run(command, "now");
            assert!(peer.hear().starts_with("@ slot"));
            peer
        })
        .collect();
    there.push(first);
    let mut server = there.remove(0);
    assert_eq!(server.ask("listen 3000"), "@ listens");

    // Every kind of address.
    let gsi = gsi();
    for address in ["10.77.0.2", "fd77::2", "fe80::77:2"] {
        eprintln!("to {address}");
        let id = connect(gsi, ip(address), 3000, 20);
        establish(gsi, id);
        disconnect(gsi, id);
    }
    server.expect("seen", "@ 3 3 3");

    // Somebody's requests reach another process there than the one that listens, which hands them on.
    let handed_on = |there: &mut [Peer]| -> u64 {
        let counts = there.iter_mut().map(|peer| peer.ask("counter forwarded_pkts"));
        counts.map(|answer| answer[2..].parse::<u64>().unwrap()).sum()
    };
    let mut n = 3;
    let mut astray = loop {
        let before = handed_on(&mut there);
        let mut client = Peer::spawn();
        assert_eq!(client.ask("connect 10.77.0.2 3000 10 20"), "@ connected");
        n += 10;
        if handed_on(&mut there) >= before + 10 {
            break client;
        }
        assert_eq!(client.ask("disconnect"), "@ disconnected");
        assert!(n < 500, "they always go to the right process");
    };
    // More than a Unix socket's queue holds.
    assert_eq!(astray.ask("connect 10.77.0.2 3000 1000 20"), "@ connected");
    n += 1000;
    server.expect("seen", &format!("@ {n} {n} {}", n - 1010));

    // A stopped process holds up a request that happens to reach it, but not its repetition.
    let stop = |signal: i32| {
        for peer in &there[..2] {
            // SAFETY: kill touches no memory; the children are ours and not waited for.
            unsafe { libc::kill(peer.child.id() as i32, signal) };
        }
    };
    stop(libc::SIGSTOP);
    for _ in 0..4 {
        let mut client = Peer::spawn();
        assert_eq!(client.ask("connect 10.77.0.2 3000 1 14"), "@ connected");
        assert_eq!(client.ask("disconnect"), "@ disconnected");
        n += 1;
    }
    stop(libc::SIGCONT);
    // Where the first of them was late by more than the connection lasted, it was one more request, which came to nothing.
    let mut seen = |n: usize, open: usize| {
        let end = Instant::now() + TIMEOUT;
        loop {
            let answer = server.ask("seen");
            let numbers: Vec<usize> =
                answer.split(' ').skip(1).map(|n| n.parse().unwrap()).collect();
            if numbers[0] >= n && numbers[1..] == [n, numbers[0] - open] {
                return;
            }
            assert!(Instant::now() < end, "{answer}, {open} of {n} open");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    seen(n, 1010);

    // A process that ends tells its peers. Another process with connections tells those that it cannot reach in time.
    let watching = connect(gsi, ip("10.77.0.2"), 3000, 20);
    establish(gsi, watching);
    astray.close();
    assert!(astray.child.wait().unwrap().success());
    n += 1;
    seen(n, 1);
    disconnect(gsi, watching);
    // Now there is no other.
    let mut client = Peer::spawn();
    assert_eq!(client.ask("connect 10.77.0.2 3000 10 20"), "@ connected");
    n += 10;
    client.close();
    assert!(client.child.wait().unwrap().success());
    seen(n, 0);

    // A killed process cannot tell its peers: another process there, which has a connection, does.
    assert_eq!(there[0].ask("listen 3001"), "@ listens");
    let watched = connect(gsi, ip("10.77.0.2"), 3001, 20);
    establish(gsi, watched);
    assert_eq!(there[1].ask("listen 3002"), "@ listens");
    let ids: Vec<_> = ["10.77.0.2", "fd77::2", "fe80::77:2"]
        .into_iter()
        .map(|address| {
            let id = connect(gsi, ip(address), 3002, 20);
            establish(gsi, id);
            id
        })
        .collect();
    there[0].expect("seen", "@ 1 1 0");
    there[1].expect("seen", "@ 3 3 0");
    there[1].child.kill().unwrap();
    there[1].child.wait().unwrap();
    let begin = Stopwatch::start();
    for id in ids {
        match event(gsi, of(id)) {
            CmEvent::Disconnected { how: Disconnected::Requested(_), .. } => {
                gsi.with_cm(|machine, _, now| machine.disconnect(now, id, &[])).unwrap();
            }
            // The other process has rejected the RTU, which is sent more than once.
            CmEvent::Disconnected {
                how: Disconnected::Rejected(RejReason::InvalidCommId), ..
            } => {}
            other => panic!("{other:?}"),
        }
        gsi.with_cm(|machine, _, now| machine.destroy(now, id)).unwrap();
    }
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    // Its answers find that process, whichever process gets them first.
    there[0].expect("abandoned", "@ 0");
    // It may have been the server, which had connections a moment ago.
    server.expect("abandoned", "@ 0");
    disconnect(gsi, watched);

    // No one is left of a killed process: another process there tells its peer.
    let id = connect(gsi, ip("10.77.0.2"), 3000, 20);
    establish(gsi, id);
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    let begin = Stopwatch::start();
    gsi.with_cm(|machine, _, now| machine.disconnect(now, id, &[])).unwrap();
    match event(gsi, of(id)) {
        // The second where somebody there has asked already, in the dead one's place.
        CmEvent::Disconnected {
            how: Disconnected::Acknowledged(_) | Disconnected::Requested(_),
            ..
        } => {}
        other => panic!("{other:?}"),
    }
    gsi.with_cm(|machine, _, now| machine.destroy(now, id)).unwrap();
    let id = connect(gsi, ip("10.77.0.2"), 3000, 20);
    assert!(matches!(event(gsi, of(id)), CmEvent::Rejected { .. }));
    assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
}
