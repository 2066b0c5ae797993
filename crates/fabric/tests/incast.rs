//! Whole runs.

use anyverbs_fabric::{Control, Outcome, Plan, Recovery, Transport};

fn plan(network: &str, workload: &str) -> Plan {
    Plan::parse(&format!("seed = 7\n[network]\n{network}\n[workload]\n{workload}")).expect("a plan")
}

fn run(network: &str, workload: &str, transport: Transport) -> Outcome {
    plan(network, workload).run("test", transport)
}

const STAR: &str = "shape = 'star'\nhosts = 17";
const INCAST: &str = "kind = 'incast'\nsize = 1_000_000";

#[test]
fn a_single_message_takes_the_time_of_its_bytes_and_of_the_way() {
    let transport = Transport { window_bytes: 10_000_000, ..Transport::default() };
    let outcome = run("shape = 'star'\nhosts = 2", INCAST, transport);
    // Two links of 1 us there, two for the ACK; the last packet crosses two links one after the other.
    let way = 4.0 + 0.7;
    let off = outcome.max_us - outcome.bound_us;
    assert!((4.0..way).contains(&off), "{off}");
    assert_eq!((outcome.messages, outcome.drops, outcome.marks), (1, 0, 0));
}

#[test]
fn an_incast_takes_the_time_of_the_receivers_link() {
    for (senders, size) in [(4, 2_000_000), (16, 1_000_000), (16, 50_000)] {
        let workload = format!("kind = 'incast'\nsize = {size}\nsenders = {senders}");
        let outcome = run(STAR, &workload, Transport::default());
        let over = outcome.total_us / outcome.bound_us;
        assert_eq!((outcome.messages, outcome.failed), (senders, 0));
        assert!((1.0..1.1).contains(&over), "{senders} senders: {over}");
    }
}

#[test]
fn dcqcn_holds_senders_back_that_no_window_does() {
    let network = format!(
        "{STAR}\n[network.link]\nqueue_bytes = 200_000_000\nkmin_bytes = 100_000\nkmax_bytes = 400_000"
    );
    let with = |control| {
        let transport = Transport { control, window_bytes: 20_000_000, ..Transport::default() };
        run(&network, "kind = 'incast'\nsize = 10_000_000", transport)
    };
    let (on, off) = (with(Control::Dcqcn), with(Control::None));
    assert!(on.marks > 0 && on.notifications > 0);
    assert_eq!((off.marks, off.notifications, on.drops, off.drops), (0, 0, 0, 0));
    assert!(on.longest_queue_bytes * 10 < off.longest_queue_bytes, "{on:?} {off:?}");
    // The link is never idle without control, and half of the time at most with it.
    assert!(off.total_us < off.bound_us * 1.01 && on.total_us < on.bound_us * 2.0);
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let network = "shape = 'two-tier'\nhosts = 16\nhosts_per_leaf = 4\nspines = 2\n\
                   [network.link]\nloss = 0.001\nqueue_bytes = 100_000\nkmin_bytes = 10_000\nkmax_bytes = 50_000";
    let workload = "kind = 'all-to-all'\nsize = 50_000\ncount = 2";
    let first = plan(network, workload);
    let outcome = first.run("a", first.transport);
    assert!(outcome.losses > 0 && outcome.retransmitted > 0 && outcome.marks > 0);
    assert_eq!((outcome.messages, outcome.failed), (16 * 15 * 2, 0));
    assert_eq!(plan(network, workload).run("a", first.transport), outcome);
    let other = Plan { seed: 8, ..first };
    assert_ne!(other.run("a", other.transport).times_us, outcome.times_us);
}

#[test]
fn a_ring_moves_every_part_around_twice() {
    let transport = Transport { window_bytes: 1 << 20, ..Transport::default() };
    let outcome =
        run("shape = 'star'\nhosts = 8", "kind = 'ring-all-reduce'\nsize = 8_000_000", transport);
    assert_eq!((outcome.messages, outcome.failed), (8 * 14, 0));
    // Each of the 14 steps waits for two links, and for one packet more than its bytes.
    let over = outcome.total_us - outcome.bound_us;
    assert!((14.0 * 2.0..14.0 * 3.0).contains(&over), "{over}");
}

#[test]
fn a_full_queue_drops_and_everything_arrives_all_the_same() {
    let network = format!(
        "{STAR}\n[network.link]\nqueue_bytes = 50_000\nkmin_bytes = 50_000\nkmax_bytes = 50_000"
    );
    let outcome = run(&network, INCAST, Transport::default());
    assert!(outcome.drops > 0 && outcome.longest_queue_bytes <= 50_000);
    assert_eq!((outcome.messages, outcome.failed), (16, 0));
}

#[test]
fn selective_retransmit_sends_little_more_than_what_was_lost() {
    let network = format!("{STAR}\n[network.link]\nloss = 0.001");
    let workload = "kind = 'all-to-all'\nsize = 1_000_000";
    let with = |recovery| run(&network, workload, Transport { recovery, ..Transport::default() });
    let (selective, back) = (with(Recovery::Selective), with(Recovery::GoBackN));
    assert!(selective.losses > 100 && selective.failed + back.failed == 0);
    assert!(selective.retransmitted < selective.losses * 3, "{selective:?}");
    assert!(back.retransmitted > back.losses * 6, "{back:?}");
}

#[test]
fn a_slow_host_that_takes_no_part_does_not_count() {
    let network = "shape = 'links'\nhosts = ['a', 'b', 'c']\nswitches = ['s']\n\
                   [[network.links]]\nends = ['a', 's']\n\
                   [[network.links]]\nends = ['b', 's']\n\
                   [[network.links]]\nends = ['c', 's']\ngbps = 1";
    let bound = |senders| {
        let workload = format!("kind = 'incast'\nsize = 1_000_000\nsenders = {senders}");
        run(network, &workload, Transport::default()).bound_us
    };
    assert!((81.0..82.0).contains(&bound(1)) && (8100.0..8200.0).contains(&bound(2)));
}

#[test]
fn the_examples_are_plans() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/simulate");
    let mut hosts = Vec::new();
    for entry in std::fs::read_dir(directory).expect("the examples are there") {
        let path = entry.expect("an entry").path();
        let text = std::fs::read_to_string(&path).expect("text");
        let plan = Plan::parse(&text).unwrap_or_else(|reason| panic!("{path:?}: {reason}"));
        hosts.push(plan.topology.hosts());
    }
    hosts.sort_unstable();
    assert_eq!(hosts, [16, 17, 64, 1000]);
}

fn example(name: &str) -> Vec<Outcome> {
    let path = format!("{}/../../examples/simulate/{name}", env!("CARGO_MANIFEST_DIR"));
    let plan = Plan::parse(&std::fs::read_to_string(path).expect("text")).expect("a plan");
    plan.settings.iter().map(|(name, transport)| plan.run(name, *transport)).collect()
}

#[test]
fn no_two_settings_of_an_example_are_the_same_run() {
    // The others take long here, and have more to compare.
    for name in ["incast.toml", "loss.toml"] {
        let outcomes = example(name);
        for (n, one) in outcomes.iter().enumerate() {
            for other in &outcomes[n + 1..] {
                assert_ne!(one.times_us, other.times_us, "{name}: {}", one.setting);
            }
        }
    }
}

#[test]
fn the_example_of_loss_shows_what_going_back_costs() {
    let [selective, back, early, early_back] = &example("loss.toml")[..] else { panic!("four") };
    for (one, other) in [(selective, back), (early, early_back)] {
        assert!(one.losses > 100 && other.losses > 100, "{one:?} {other:?}");
        assert!(other.retransmitted > 10 * one.retransmitted, "{one:?} {other:?}");
        assert!(other.mean_us > one.mean_us, "{one:?} {other:?}");
    }
}
