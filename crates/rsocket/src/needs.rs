//! The sizes of the objects of a stream socket, and whether a device has them.

use anyverbs::QpCap;
use anyverbs::limits::{Bound, DeviceAttr, bound};
use anyverbs::persona::Feature;

use crate::config::Config;
use crate::machine::Sizes;
use crate::wire::Target;

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

/// The kind of sockets that a device does not give with this process's configuration, and the reason: a feature that it lacks, or a
/// limit.
#[must_use]
pub fn obstacle(attr: &DeviceAttr) -> Option<(&'static str, String)> {
    of(attr, crate::config::config())
}

fn of(attr: &DeviceAttr, config: &Config) -> Option<(&'static str, String)> {
    let lacks =
        |feature: Feature| attr.lacks.has(feature).then(|| format!("it lacks {}", feature.text()));
    let stream = lacks(Feature::Rc).or_else(|| limit(attr, config)).map(|why| ("stream", why));
    // Datagrams need less.
    stream.or_else(|| Some(("datagram", lacks(Feature::Ud)?)))
}

/// The first limit that is too low for a stream.
fn limit(attr: &DeviceAttr, config: &Config) -> Option<String> {
    let sizes = Sizes {
        send_queue: config.send_queue,
        recv_queue: config.recv_queue,
        send_buffer: config.send_buffer,
        recv_buffer: config.recv_buffer,
        inline: config.inline.into(),
    };
    let cap = cap(&sizes);
    let needs: [(Bound, u32); 5] = [
        (bound!(max_cqe), cqe(&sizes)),
        (bound!(max_qp_wr), cap.max_send_wr.max(cap.max_recv_wr)),
        (bound!(max_sge), cap.max_send_sge),
        (bound!(max_inline_data), cap.max_inline_data),
        (bound!(max_mr), REGIONS),
    ];
    let (Bound { name, .. }, has, need) = needs
        .into_iter()
        .map(|(bound, need)| (bound, (bound.of)(attr), need))
        .find(|(_, has, need)| has < need)?;
    Some(format!("{name} = {has}, and a socket needs {need}"))
}

#[cfg(test)]
mod tests {
    use anyverbs::limits::DEFAULT;

    use super::*;

    #[test]
    fn the_first_limit_that_is_too_low_is_named() {
        let of = |attr: DeviceAttr| Some(of(&attr, &Config::default())?.1);
        assert_eq!(of(DEFAULT), None);
        let just = DeviceAttr {
            max_cqe: 768,
            max_qp_wr: 384,
            max_sge: 2,
            max_inline_data: 64,
            max_mr: 3,
            ..DEFAULT
        };
        assert_eq!(of(just), None);
        for (attr, wanted) in [
            (DeviceAttr { max_cqe: 767, ..just }, "max_cqe = 767, and a socket needs 768"),
            (DeviceAttr { max_qp_wr: 383, ..just }, "max_qp_wr = 383, and a socket needs 384"),
            (DeviceAttr { max_sge: 1, ..just }, "max_sge = 1, and a socket needs 2"),
            (
                DeviceAttr { max_inline_data: 63, ..just },
                "max_inline_data = 63, and a socket needs 64",
            ),
            (DeviceAttr { max_mr: 2, ..just }, "max_mr = 2, and a socket needs 3"),
            (
                DeviceAttr { lacks: [Feature::Rc].into_iter().collect(), ..just },
                "it lacks reliable connections (RC)",
            ),
        ] {
            assert_eq!(of(attr).as_deref(), Some(wanted));
        }
        let mana = DeviceAttr { lacks: [Feature::Ud].into_iter().collect(), ..just };
        let datagram = ("datagram", "it lacks datagrams (UD)".to_owned());
        assert_eq!(super::of(&mana, &Config::default()), Some(datagram));
        let small = Config { send_queue: 16, ..Config::default() };
        assert_eq!(super::of(&DeviceAttr { max_cqe: 400, ..just }, &small), None);
    }
}
