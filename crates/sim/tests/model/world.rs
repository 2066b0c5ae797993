//! The world of a run, and the oracle's knowledge of it.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use anyverbs_proto::mr::Access;
use anyverbs_proto::qp::attr::QpType;
use anyverbs_proto::types::Qpn;
use anyverbs_proto::wc::WcOpcode;
use anyverbs_sim::{CqId, DeviceId, Mr, QpId, QpOptions, Sim, SrqId};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::Ways;
use crate::config::Config;
use crate::slots::{Slot, Slots};

/// Words that all queue pairs add to.
pub(crate) const COUNTERS: usize = 4;

pub(crate) struct World {
    pub(crate) sim: Sim,
    pub(crate) rng: SmallRng,
    pub(crate) config: Config,
    pub(crate) hosts: Vec<Host>,
    pub(crate) qps: Vec<QpModel>,
    pub(crate) cqs: Vec<CqId>,
    /// Results and addends of fetch-adds, by host and counter.
    pub(crate) added: BTreeMap<(usize, usize), Vec<(u64, u64)>>,
    /// The next immediate, so that messages can be told apart.
    pub(crate) next_imm: u32,
    /// Everything that completed, to compare runs.
    pub(crate) log: Vec<(u64, u8, u32)>,
}

pub(crate) struct Host {
    pub(crate) device: DeviceId,
    pub(crate) pd: u32,
    /// Noise to send from; the oracle's copy of it.
    pub(crate) source: Mr,
    pub(crate) source_bytes: Vec<u8>,
    /// Memory for inline data, which changes all the time.
    pub(crate) scratch: Mr,
    pub(crate) slots: Slots,
    pub(crate) counters: Mr,
    pub(crate) srq: Option<SrqId>,
    /// Receives in the shared queue, or taken from it and not complete.
    pub(crate) srq_recvs: BTreeMap<u64, Slot>,
    pub(crate) srq_max: usize,
    /// Shared queues of type XRC, in one domain: any target of this host takes from the one that a request names.
    pub(crate) xrc: Vec<XrcSrq>,
    pub(crate) next_recv: u64,
}

pub(crate) struct XrcSrq {
    pub(crate) id: SrqId,
    pub(crate) cq: CqId,
    /// Receives in it, or taken from it and not complete.
    pub(crate) recvs: BTreeMap<u64, Slot>,
    pub(crate) max: usize,
}

/// A message that a queue pair should get, or may.
#[derive(Clone, Debug)]
pub(crate) struct Message {
    pub(crate) opcode: WcOpcode,
    pub(crate) bytes: Vec<u8>,
    /// The place of a WRITE's data on the board.
    pub(crate) at: usize,
    pub(crate) imm: Option<u32>,
    pub(crate) inv: Option<u32>,
    /// The host's SRQ of type XRC that it is for.
    pub(crate) srq: Option<usize>,
    /// The queue pair that sent it.
    pub(crate) from: Qpn,
    /// Number of times that it was received.
    pub(crate) received: u32,
}

/// The check when a send completes.
#[derive(Clone, Debug)]
pub(crate) enum Check {
    Nothing,
    /// The buffer holds these bytes.
    Read(Slot, Vec<u8>),
    /// The buffer holds a word: the value before a compare-swap.
    Swapped(Slot, u64),
    /// ... or before a fetch-add to a counter of this host.
    Added {
        slot: Slot,
        host: usize,
        counter: usize,
        add: u64,
    },
}

/// A send that is not complete.
#[derive(Clone, Debug)]
pub(crate) struct Send {
    pub(crate) wr_id: u64,
    pub(crate) signaled: bool,
    pub(crate) opcode: WcOpcode,
    pub(crate) len: usize,
    pub(crate) check: Check,
    pub(crate) release: Vec<Slot>,
    /// The index of the message at the peer.
    pub(crate) message: Option<usize>,
}

/// One queue pair: the requests that it got, and the messages that it should get.
pub(crate) struct QpModel {
    pub(crate) id: QpId,
    pub(crate) qpn: Qpn,
    pub(crate) host: usize,
    pub(crate) options: QpOptions,
    /// The connected one; its own number for datagrams.
    pub(crate) peer: usize,
    pub(crate) send_cq: CqId,
    pub(crate) recv_cq: CqId,
    pub(crate) on_srq: bool,
    pub(crate) max_send_wr: usize,
    pub(crate) max_recv_wr: usize,
    pub(crate) max_inline: usize,

    pub(crate) sends: VecDeque<Send>,
    pub(crate) next_wr_id: u64,
    pub(crate) send_failed: bool,
    /// Messages of ours whose sends completed well, as an index into the peer's messages.
    pub(crate) sent_messages: usize,

    pub(crate) recvs: VecDeque<(u64, Slot)>,
    pub(crate) recv_failed: bool,
    pub(crate) messages: Vec<Message>,
    /// Reliable: messages before this one were received. UC: one past the last that was received.
    pub(crate) next_message: usize,

    /// The region that the peer writes to and reads from.
    pub(crate) board: Mr,
    /// The expected contents of the peer's board after all that we wrote.
    pub(crate) shadow: Vec<u8>,
    /// Ranges of it that READs want as they are.
    pub(crate) pins: Vec<(u64, Range<usize>)>,
    /// Unreliable: ranges that we wrote, each once.
    pub(crate) written: Vec<Range<usize>>,
    pub(crate) written_up_to: usize,
    /// A word beside the peer's board that only we swap.
    pub(crate) word: u64,

    /// Something broke this connection on purpose: anything but success is possible from now on.
    pub(crate) broken: bool,
    pub(crate) destroyed: bool,
}

impl QpModel {
    pub(crate) fn qp_type(&self) -> QpType {
        self.options.qp_type
    }

    /// Bytes of its board; the word lies behind them.
    pub(crate) fn board_len(&self) -> usize {
        self.board.len - 8
    }

    pub(crate) fn is_reliable(&self) -> bool {
        self.qp_type().is_reliable()
    }

    /// Room in front of a message.
    pub(crate) fn grh(&self) -> usize {
        if self.qp_type() == QpType::Ud { 40 } else { 0 }
    }
}

impl World {
    pub(crate) fn new(seed: u64, ways: Ways) -> Self {
        let mut rng = SmallRng::seed_from_u64(seed);
        let config = Config::new(&mut rng, ways);
        let mut sim = Sim::new(rng.random());
        sim.net.default_link = config.link.clone();
        sim.ack_delay = config.ack_delay;
        sim.do_directly(config.direct);
        sim.use_lanes(config.lanes);
        let mut world = Self {
            sim,
            rng,
            config,
            hosts: Vec::new(),
            qps: Vec::new(),
            cqs: Vec::new(),
            added: BTreeMap::new(),
            next_imm: 0,
            log: Vec::new(),
        };
        for _ in 0..world.config.devices {
            let host = world.host();
            world.hosts.push(host);
        }
        for qp_type in world.config.pairs.clone() {
            let hosts = [(); 2].map(|()| world.rng.random_range(0..world.hosts.len()));
            let first = world.qps.len();
            let mut options = hosts.map(|_| world.config.options(&mut world.rng, qp_type));
            if qp_type == QpType::XrcSend {
                options[1].qp_type = QpType::XrcRecv;
            }
            options[1].mtu = options[0].mtu;
            options[1].max_rd_atomic = options[0].max_dest_rd_atomic;
            options[0].max_rd_atomic = options[1].max_dest_rd_atomic;
            for (i, (host, options)) in hosts.into_iter().zip(options).enumerate() {
                let peer = if qp_type == QpType::Ud { first + i } else { first + 1 - i };
                let qp = world.qp(host, options, peer);
                world.qps.push(qp);
            }
            let [a, b] = [first, first + 1].map(|i| (world.qps[i].id, world.qps[i].options));
            world.sim.connect((a.0, &a.1), (b.0, &b.1));
            for i in [first, first + 1] {
                let theirs = world.qps[world.qps[i].peer].board;
                let shadow = world.sim.bytes(theirs, 0, theirs.len - 8);
                world.qps[i].word = world.sim.word(theirs, theirs.len - 8);
                world.qps[i].shadow = shadow;
            }
        }
        world
    }

    fn host(&mut self) -> Host {
        let Self { sim, rng, config, cqs, .. } = self;
        let device = sim.device();
        let pd = sim.pd(device);
        let source = sim.mr(device, pd, 2 * config.max_len + 4096, Access::empty());
        sim.fill(source, rng.random());
        // A datagram's GRH comes on top.
        let slot_len = config.max_len + 40;
        // Enough for every queue to be full.
        let count = (4 * config.pairs.len() + 3) * config.depth() as usize;
        let landing = sim.mr(device, pd, Slots::bytes(count, slot_len), Access::LOCAL_WRITE);
        let srq_max = rng.random_range(1..=config.depth());
        let mut xrc = Vec::new();
        for _ in 0..if config.pairs.contains(&QpType::XrcSend) { 2 } else { 0 } {
            if xrc.is_empty() || !config.shared_cq {
                cqs.push(sim.cq(device, 10_000));
            }
            let (cq, max) = (cqs[cqs.len() - 1], rng.random_range(1..=config.depth()));
            let id = sim.xrc_srq(pd, pd, cq, max, 4);
            xrc.push(XrcSrq { id, cq, recvs: BTreeMap::new(), max: max as usize });
        }
        Host {
            device,
            pd,
            source,
            source_bytes: sim.bytes(source, 0, source.len),
            scratch: sim.mr(device, pd, 256, Access::empty()),
            slots: Slots::new(sim, landing, slot_len),
            counters: sim.mr(device, pd, COUNTERS * 8, Access::REMOTE_ATOMIC),
            srq: config.srq.then(|| sim.srq(device, srq_max, 4)),
            srq_recvs: BTreeMap::new(),
            srq_max: srq_max as usize,
            xrc,
            next_recv: 1 << 32,
        }
    }

    fn qp(&mut self, host: usize, options: QpOptions, peer: usize) -> QpModel {
        let Self { sim, rng, config, hosts, cqs, .. } = self;
        let Host { device, pd, srq, .. } = hosts[host];
        let mut cq = || match cqs.iter().find(|cq| cq.device == device) {
            Some(cq) if config.shared_cq => *cq,
            _ => {
                cqs.push(sim.cq(device, options.cqe));
                cqs[cqs.len() - 1]
            }
        };
        let (send_cq, recv_cq) = (cq(), cq());
        let xrc = matches!(options.qp_type, QpType::XrcSend | QpType::XrcRecv);
        let srq = srq.filter(|_| !xrc && rng.random_bool(0.7));
        let id = match options.qp_type {
            QpType::XrcRecv => sim.xrc_target(pd, recv_cq, &options),
            _ => sim.qp(pd, send_cq, recv_cq, srq, &options),
        };
        let access = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        // UC writes each byte once, and needs room for that.
        let len = if options.qp_type == QpType::Uc { 8 } else { 2 } * config.max_len;
        let board = sim.mr(device, pd, len.next_multiple_of(8) + 8, access);
        sim.fill(board, rng.random());
        let cap = sim.get(id).init().cap;
        QpModel {
            id,
            qpn: sim.get(id).qpn(),
            host,
            options,
            peer,
            send_cq,
            recv_cq,
            on_srq: srq.is_some(),
            max_send_wr: cap.max_send_wr as usize,
            max_recv_wr: cap.max_recv_wr as usize,
            max_inline: cap.max_inline_data as usize,
            sends: VecDeque::new(),
            next_wr_id: 0,
            send_failed: false,
            sent_messages: 0,
            recvs: VecDeque::new(),
            recv_failed: false,
            messages: Vec::new(),
            next_message: 0,
            board,
            shadow: Vec::new(),
            pins: Vec::new(),
            written: Vec::new(),
            written_up_to: 0,
            word: 0,
            broken: false,
            destroyed: false,
        }
    }
}
