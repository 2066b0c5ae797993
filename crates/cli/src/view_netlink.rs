//! The view object's answers on RDMA netlink sockets: the attributes of devices and ports, as they go into a message
//! (`rdma_netlink.h` of Linux).

use std::collections::HashMap;
use std::fs;
use std::io;
use std::ops::Range;
use std::path::Path;

use anyverbs::watch::Seen;
use anyverbs_page::{CompletionQueue, QueuePair, Snapshot};

use crate::counters::{self, Counters};
use crate::device::{Device, Port};

const DEV_INDEX: u16 = 1;
const DEV_NAME: u16 = 2;
/// The number of ports of a device.
const PORT_INDEX: u16 = 3;
const FW_VERSION: u16 = 5;
const NODE_GUID: u16 = 6;
const SYS_IMAGE_GUID: u16 = 7;
const PORT_STATE: u16 = 12;
const PORT_PHYS_STATE: u16 = 13;
const DEV_NODE_TYPE: u16 = 14;
const NDEV_INDEX: u16 = 50;
const NDEV_NAME: u16 = 51;
const DEV_PROTOCOL: u16 = 67;

const RES_SUMMARY: u16 = 15;
const RES_SUMMARY_ENTRY: u16 = 16;
const RES_SUMMARY_ENTRY_NAME: u16 = 17;
const RES_SUMMARY_ENTRY_CURR: u16 = 18;
const RES_QP: u16 = 19;
const RES_QP_ENTRY: u16 = 20;
const RES_LQPN: u16 = 21;
const RES_RQPN: u16 = 22;
const RES_RQ_PSN: u16 = 23;
const RES_SQ_PSN: u16 = 24;
const RES_TYPE: u16 = 26;
const RES_STATE: u16 = 27;
const RES_PID: u16 = 28;
const RES_CQ: u16 = 35;
const RES_CQ_ENTRY: u16 = 36;
const RES_CQE: u16 = 37;
const RES_USECNT: u16 = 38;
const RES_MR: u16 = 40;
const RES_PD: u16 = 46;
const RES_PDN: u16 = 60;
const RES_CQN: u16 = 61;
const HWCOUNTERS: u16 = 80;
const HWCOUNTER_ENTRY: u16 = 81;
const HWCOUNTER_ENTRY_NAME: u16 = 82;
const HWCOUNTER_ENTRY_VALUE: u16 = 83;
/// The attribute has attributes in it.
const NESTED: u16 = 1 << 15;

/// Bytes of a message without its header, at most: the view reads no more.
const MOST: usize = 3800;

const NODE_TYPE_CA: u8 = 1;

/// Attributes of a message, each padded to four bytes.
#[derive(Debug, Default)]
struct Attributes(Vec<u8>);

impl Attributes {
    fn put(&mut self, kind: u16, value: &[u8]) -> &mut Self {
        let len = (4 + value.len()) as u16;
        self.0.extend(len.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    fn nest(&mut self, kind: u16, inner: &Self) -> &mut Self {
        self.put(kind | NESTED, &inner.0)
    }

    fn number(&mut self, kind: u16, number: u32) -> &mut Self {
        self.put(kind, &number.to_ne_bytes())
    }

    fn text(&mut self, kind: u16, text: &str) -> &mut Self {
        self.put(kind, &[text.as_bytes(), b"\0"].concat())
    }
}

/// Writes a file anew: who reads it at the time sees the old one.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let fresh = path.with_extension("fresh");
    fs::write(&fresh, bytes)?;
    fs::rename(fresh, path)
}

/// Writes the answers of a device with this number.
pub(crate) fn write(tree: &Path, device: &Device, index: u32) -> io::Result<()> {
    let dir = tree.join("netlink").join(index.to_string());
    fs::create_dir_all(&dir)?;
    let mut attributes = Attributes::default();
    attributes
        .put(DEV_INDEX, &index.to_ne_bytes())
        .text(DEV_NAME, &device.name)
        .put(PORT_INDEX, &(device.ports.len() as u32).to_ne_bytes())
        .text(FW_VERSION, &device.fw_ver)
        .put(NODE_GUID, &device.node_guid.to_ne_bytes())
        .put(SYS_IMAGE_GUID, &device.sys_image_guid.to_ne_bytes())
        .put(DEV_NODE_TYPE, &[NODE_TYPE_CA])
        .text(DEV_PROTOCOL, "roce");
    fs::write(dir.join("device"), &attributes.0)?;
    for (number, port) in device.numbered() {
        write_port(&tree.join("netlink"), (device, index), (number, port), port.state)?;
    }
    Ok(())
}

/// Writes the answer about a port of a device in this state.
pub(crate) fn write_port(
    dir: &Path,
    (device, index): Numbered<'_>,
    (number, port): (u32, &Port),
    state: u8,
) -> io::Result<()> {
    let mut attributes = Attributes::default();
    attributes
        .put(DEV_INDEX, &index.to_ne_bytes())
        .text(DEV_NAME, &device.name)
        .put(PORT_INDEX, &number.to_ne_bytes())
        .put(PORT_STATE, &[state])
        .put(PORT_PHYS_STATE, &[crate::device::phys_state(state)]);
    if let Some(gid) = port.address() {
        attributes.put(NDEV_INDEX, &gid.ifindex.to_ne_bytes()).text(NDEV_NAME, &gid.ndev);
    }
    let dir = dir.join(index.to_string());
    fs::create_dir_all(&dir)?;
    replace(&dir.join(number.to_string()), &attributes.0)
}

/// A device and its number.
type Numbered<'a> = (&'a Device, u32);

/// Writes the answers that change: what the processes have, and the counters of the device's ports. The first of these has the place
/// `first` among the ports of all devices. Those of the summary are of all devices together, as limits are.
pub(crate) fn write_live(
    dir: &Path,
    device: Numbered<'_>,
    (first, counted): (u32, &[Counters]),
    seen: &[Seen],
) -> io::Result<()> {
    let dir = dir.join(device.1.to_string());
    fs::create_dir_all(&dir)?;
    let pages: Vec<(u32, &Snapshot)> = seen
        .iter()
        .filter_map(|process| Some((process.pid, process.page.as_ref()?.as_ref().ok()?)))
        .collect();
    let messages = |name, entries: Vec<Attributes>| messages(device, name, entries);
    for (command, messages) in [
        (9, vec![summary(device, &pages)]),
        (10, messages(RES_QP, queue_pairs(&pages, first..first + counted.len() as u32))),
        (12, messages(RES_CQ, completion_queues(&pages, first))),
        // Regions and domains are counted, and not listed.
        (13, messages(RES_MR, Vec::new())),
        (14, messages(RES_PD, Vec::new())),
        (17, (1..).zip(counted).map(|(port, all)| statistic(device, port, all)).collect()),
    ] {
        let bytes: Vec<u8> = messages
            .iter()
            .flat_map(|Attributes(body)| {
                [&(body.len() as u32).to_ne_bytes()[..], body.as_slice()].concat()
            })
            .collect();
        replace(&dir.join(format!("c{command}")), &bytes)?;
    }
    Ok(())
}

/// The beginning of each answer.
fn head((device, index): Numbered<'_>) -> Attributes {
    let mut head = Attributes::default();
    head.number(DEV_INDEX, index).text(DEV_NAME, &device.name);
    head
}

/// Those of the ports of a device.
fn queue_pairs(pages: &[(u32, &Snapshot)], ports: Range<u32>) -> Vec<Attributes> {
    let all = |(pid, page): &(u32, &Snapshot)| {
        let own = page.queue_pairs.iter().filter(|qp| ports.contains(&qp.port));
        own.map(|qp| queue_pair(*pid, qp, qp.port - ports.start + 1)).collect::<Vec<_>>()
    };
    pages.iter().flat_map(all).collect()
}

/// Those of a device whose first port has this place.
fn completion_queues(pages: &[(u32, &Snapshot)], first: u32) -> Vec<Attributes> {
    let all = |(pid, page): &(u32, &Snapshot)| {
        let mut users = HashMap::<u32, u64>::new();
        for qp in &page.queue_pairs {
            let (sends, receives) = (qp.sends.completion_queue, qp.receives.completion_queue);
            *users.entry(sends).or_default() += 1;
            if sends != receives {
                *users.entry(receives).or_default() += 1;
            }
        }
        let own = page.completion_queues.iter().filter(|cq| cq.device == first);
        let of = |cq: &CompletionQueue| users.get(&cq.number).copied().unwrap_or(0);
        own.map(|cq| completion_queue(*pid, cq, of(cq))).collect::<Vec<_>>()
    };
    pages.iter().flat_map(all).collect()
}

/// Messages with as many entries as have room in each.
fn messages(device: Numbered<'_>, name: u16, entries: Vec<Attributes>) -> Vec<Attributes> {
    let mut messages = Vec::new();
    let mut nest = Attributes::default();
    let end = |nest: &mut Attributes| {
        let mut message = head(device);
        message.nest(name, nest);
        nest.0.clear();
        message
    };
    for Attributes(entry) in entries {
        if !nest.0.is_empty() && nest.0.len() + entry.len() > MOST - 200 {
            messages.push(end(&mut nest));
        }
        nest.0.extend(entry);
    }
    messages.push(end(&mut nest));
    messages
}

fn summary(device: Numbered<'_>, pages: &[(u32, &Snapshot)]) -> Attributes {
    let mut nest = Attributes::default();
    let sum =
        |of: fn(&Snapshot) -> u32| pages.iter().map(|(_, page)| u64::from(of(page))).sum::<u64>();
    for (name, current) in [
        ("pd", sum(|page| page.process.objects.protection_domains)),
        ("cq", sum(|page| page.process.objects.completion_queues)),
        ("qp", sum(|page| page.process.objects.queue_pairs)),
        ("mr", sum(|page| page.process.objects.regions)),
        ("srq", sum(|page| page.process.objects.shared_receive_queues)),
    ] {
        let mut entry = Attributes::default();
        entry
            .text(RES_SUMMARY_ENTRY_NAME, name)
            .put(RES_SUMMARY_ENTRY_CURR, &current.to_ne_bytes());
        nest.nest(RES_SUMMARY_ENTRY, &entry);
    }
    let mut message = head(device);
    message.nest(RES_SUMMARY, &nest);
    message
}

fn queue_pair(pid: u32, qp: &QueuePair, port: u32) -> Attributes {
    let mut entry = Attributes::default();
    entry.number(PORT_INDEX, port).number(RES_LQPN, qp.number);
    if qp.peer.number != 0 {
        entry.number(RES_RQPN, qp.peer.number).number(RES_RQ_PSN, qp.peer.psns.expected);
    }
    // The kernel tells the PSN of the next send in every state, and `rdma` ends with an error at an entry without it.
    entry
        .number(RES_SQ_PSN, qp.peer.psns.next)
        .put(RES_TYPE, &[qp.kind])
        .put(RES_STATE, &[qp.state])
        .number(RES_PDN, qp.protection_domain)
        .number(RES_PID, pid);
    let mut all = Attributes::default();
    all.nest(RES_QP_ENTRY, &entry);
    all
}

fn completion_queue(pid: u32, cq: &CompletionQueue, users: u64) -> Attributes {
    let mut entry = Attributes::default();
    entry
        .number(RES_CQE, cq.depth)
        .put(RES_USECNT, &users.to_ne_bytes())
        .number(RES_CQN, cq.number)
        .number(RES_PID, pid);
    let mut all = Attributes::default();
    all.nest(RES_CQ_ENTRY, &entry);
    all
}

fn statistic(device: Numbered<'_>, port: u32, all: &Counters) -> Attributes {
    let mut nest = Attributes::default();
    for (name, value) in counters::hardware(all) {
        let mut entry = Attributes::default();
        entry.text(HWCOUNTER_ENTRY_NAME, name).put(HWCOUNTER_ENTRY_VALUE, &value.to_ne_bytes());
        nest.nest(HWCOUNTER_ENTRY, &entry);
    }
    let mut message = head(device);
    message.number(PORT_INDEX, port).nest(HWCOUNTERS, &nest);
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kinds of the attributes of a message.
    fn kinds(mut bytes: &[u8]) -> Vec<u16> {
        let mut kinds = Vec::new();
        while let [a, b, c, d, ..] = *bytes {
            kinds.push(u16::from_ne_bytes([c, d]) & !NESTED);
            bytes = &bytes[usize::from(u16::from_ne_bytes([a, b])).next_multiple_of(4)..];
        }
        kinds
    }

    #[test]
    fn a_queue_pair_without_a_peer_has_what_rdma_requires() {
        for (peer, has_peer) in [(0, false), (17, true)] {
            let mut qp = QueuePair { number: 5, ..QueuePair::default() };
            qp.peer.number = peer;
            let Attributes(entry) = queue_pair(1, &qp, 1);
            assert_eq!(kinds(&entry), [RES_QP_ENTRY]);
            let kinds = kinds(&entry[4..]);
            for required in [RES_LQPN, RES_SQ_PSN, RES_TYPE, RES_STATE, RES_PID] {
                assert!(kinds.contains(&required), "{required} of {kinds:?}");
            }
            assert_eq!(kinds.contains(&RES_RQPN), has_peer);
        }
    }
}
