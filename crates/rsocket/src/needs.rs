//! The sizes of the objects of a socket, and whether a device has them.

use anyverbs::QpCap;
use anyverbs::limits::{Bound, DeviceAttr, bound};
use anyverbs::persona::Feature;

use crate::config::Config;
use crate::dgram::MAX_DATAGRAM;
use crate::machine::Sizes;
use crate::wire::Target;

/// Datagrams that a queue and its buffer hold.
pub(crate) fn slots(queue: u16, buffer: u32) -> u32 {
    u32::from(queue).min(buffer / MAX_DATAGRAM as u32).max(1)
}

/// The queue pair of a datagram socket on a port, with so many buffers each way.
pub(crate) fn datagram_cap(send: u32, recv: u32, inline: u32) -> QpCap {
    QpCap {
        max_send_wr: send,
        max_recv_wr: recv,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline_data: inline,
    }
}

/// Entries of its completion queue.
pub(crate) fn datagram_cqe(send: u32, recv: u32, ports: u8) -> u32 {
    send + u32::from(ports) * recv
}

/// Regions of a stream: two rings and a table.
const REGIONS: u32 = 3;

/// The queue pair of a stream.
pub(crate) fn cap(sizes: &Sizes) -> QpCap {
    QpCap {
        max_send_wr: sizes.send_queue.into(),
        max_recv_wr: sizes.recv_queue.into(),
        max_send_sge: 2,
        max_recv_sge: 1,
        max_inline_data: sizes.inline.max(Target::LEN as u32),
    }
}

/// Entries of its completion queue.
pub(crate) fn cqe(sizes: &Sizes) -> u32 {
    u32::from(sizes.send_queue) + u32::from(sizes.recv_queue)
}

/// The kinds of sockets that a device does not give with this process's configuration, and the reason: a feature that it lacks, or
/// limits.
pub fn obstacles(attr: &DeviceAttr) -> impl Iterator<Item = (&'static str, String)> {
    of(attr, crate::config::config()).into_iter()
}

fn of(attr: &DeviceAttr, config: &Config) -> Vec<(&'static str, String)> {
    let kinds = [
        ("stream", Feature::Rc, stream(config)),
        ("datagram", Feature::Ud, datagram(attr, config)),
    ];
    let lacks = |(kind, feature, needs): (_, Feature, Needs)| {
        let why = match attr.lacks.has(feature) {
            true => format!("it lacks {}", feature.text()),
            false => limits(attr, needs)?,
        };
        Some((kind, why))
    };
    kinds.into_iter().filter_map(lacks).collect()
}

/// Limits, and the least that a socket needs of each.
type Needs = [(Bound, u32); 5];

fn stream(config: &Config) -> Needs {
    let sizes = Sizes {
        send_queue: config.send_queue,
        recv_queue: config.recv_queue,
        send_buffer: config.send_buffer,
        recv_buffer: config.recv_buffer,
        inline: config.inline.into(),
    };
    needs(&cap(&sizes), cqe(&sizes), REGIONS)
}

fn datagram(attr: &DeviceAttr, config: &Config) -> Needs {
    let send = slots(config.send_queue, config.send_buffer);
    let recv = slots(config.recv_queue, config.recv_buffer);
    let cap = datagram_cap(send, recv, config.inline.into());
    // It sends from one port at least.
    needs(&cap, datagram_cqe(send, recv, attr.phys_port_cnt), 2)
}

fn needs(cap: &QpCap, cqe: u32, regions: u32) -> Needs {
    [
        (bound!(max_cqe), cqe),
        (bound!(max_qp_wr), cap.max_send_wr.max(cap.max_recv_wr)),
        (bound!(max_sge), cap.max_send_sge),
        (bound!(max_inline_data), cap.max_inline_data),
        (bound!(max_mr), regions),
    ]
}

/// The limits that are too low.
fn limits(attr: &DeviceAttr, needs: Needs) -> Option<String> {
    let low = needs.into_iter().filter_map(|(Bound { name, of }, need)| {
        let has = of(attr);
        (has < need).then(|| format!("{name} = {has}, and a socket needs {need}"))
    });
    Some(low.collect::<Vec<_>>().join("; ")).filter(|low| !low.is_empty())
}

#[cfg(test)]
mod tests {
    use anyverbs::limits::DEFAULT;

    use super::*;

    #[test]
    fn the_limits_that_are_too_low_are_named_for_each_kind() {
        let of = |attr: DeviceAttr| of(&attr, &Config::default());
        assert_eq!(of(DEFAULT), []);
        let just = DeviceAttr {
            max_cqe: 768,
            max_qp_wr: 384,
            max_sge: 2,
            max_inline_data: 64,
            max_mr: 3,
            ..DEFAULT
        };
        assert_eq!(of(just), []);
        let stream = |why: &str| ("stream", why.to_owned());
        let datagram = |why: &str| ("datagram", why.to_owned());
        for (attr, wanted) in [
            (DeviceAttr { max_cqe: 767, ..just }, "max_cqe = 767, and a socket needs 768"),
            (DeviceAttr { max_qp_wr: 383, ..just }, "max_qp_wr = 383, and a socket needs 384"),
            (DeviceAttr { max_sge: 1, ..just }, "max_sge = 1, and a socket needs 2"),
            (DeviceAttr { max_mr: 2, ..just }, "max_mr = 2, and a socket needs 3"),
            (
                DeviceAttr { lacks: [Feature::Rc].into_iter().collect(), ..just },
                "it lacks reliable connections (RC)",
            ),
        ] {
            assert_eq!(of(attr), [stream(wanted)]);
        }
        let mana = DeviceAttr { lacks: [Feature::Ud].into_iter().collect(), ..just };
        assert_eq!(of(mana), [datagram("it lacks datagrams (UD)")]);
        let inline = "max_inline_data = 63, and a socket needs 64";
        let low = DeviceAttr { max_inline_data: 63, ..just };
        assert_eq!(of(low), [stream(inline), datagram(inline)]);
        let least = DeviceAttr { max_cqe: 128, max_qp_wr: 64, max_mr: 2, ..just };
        let all = "max_cqe = 128, and a socket needs 768; max_qp_wr = 64, and a socket needs 384; max_mr = 2, and a socket needs 3";
        assert_eq!(of(least), [stream(all)]);
        let two_ports = DeviceAttr { phys_port_cnt: 2, ..least };
        let cqe = "max_cqe = 128, and a socket needs 192";
        assert_eq!(of(two_ports), [stream(all), datagram(cqe)]);
        for (low, name) in [
            (DeviceAttr { max_cqe: 127, ..least }, "max_cqe = 127, and a socket needs 128"),
            (DeviceAttr { max_qp_wr: 63, ..least }, "max_qp_wr = 63, and a socket needs 64"),
            (DeviceAttr { max_mr: 1, ..least }, "max_mr = 1, and a socket needs 2"),
        ] {
            assert_eq!(of(low)[1], datagram(name));
        }
        let small = Config { send_queue: 16, ..Config::default() };
        assert_eq!(super::of(&DeviceAttr { max_cqe: 400, ..just }, &small), []);
    }
}
