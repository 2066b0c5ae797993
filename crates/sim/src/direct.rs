//! Operations that need no message: now and then, on some links, a device does them by itself.

use anyverbs_proto::direct::{Direct, Direction, Local, Place};
use anyverbs_proto::env::MemoryEnv;
use anyverbs_proto::memory::Memory;
use anyverbs_proto::mr::Access;
use anyverbs_proto::payload::{Data, Payload, hold_local, scatter};
use anyverbs_proto::wr::RemoteAddr;
use rand::Rng;
use rand::rngs::SmallRng;

use crate::device::{Around, Device};

/// The probability that a device does an operation by itself if it can.
#[derive(Debug)]
pub(crate) struct Chance {
    pub(crate) rng: SmallRng,
    pub(crate) probability: f64,
}

impl Around<'_> {
    /// Where the peer may fetch the payload of a SEND from: now and then it may. Here the key is the local one.
    pub(crate) fn place_to_fetch(&mut self, payload: &Payload<'_>) -> Option<Place> {
        let probability = self.chance.probability;
        let is_possible = self.place.link.segment > 0 && self.place.next_link.is_none();
        if probability == 0.0 || !is_possible || !self.chance.rng.random_bool(probability) {
            return None;
        }
        let (sge, pd) = payload.element()?;
        hold_local(self.mrs(), pd, &sge, Access::empty()).ok()?;
        Some(Place { at: RemoteAddr { va: sge.addr, rkey: sge.lkey }, generation: 0 })
    }

    /// Does what the peer would do on a request, if it would need no event for that.
    pub(crate) fn do_directly(&mut self, operation: &Direct<'_>) -> bool {
        let probability = self.chance.probability;
        if probability == 0.0 || !self.chance.rng.random_bool(probability) {
            return false;
        }
        let Some((device, pd)) = self.open_peer(operation) else { return false };
        let copied = self.copy(device, pd, operation).is_some();
        // The second look behind the copy of a payload may find that its sender has changed.
        let stands = operation.payload_of.is_none() || self.chance.rng.random_bool(probability);
        copied && stands
    }

    /// The peer of an operation and its protection domain, if it would execute the request.
    pub(crate) fn open_peer(&self, operation: &Direct<'_>) -> Option<(&Device, u32)> {
        let before = self.before.iter().chain(self.behind);
        let peer =
            before.flat_map(|device| device.qps.iter().flatten().map(move |qp| (device, qp)));
        let mut connected = peer.filter(|(_, slot)| {
            let attr = slot.qp.attr();
            slot.place.qpn == operation.dest_qpn
                && attr.dest_qpn == self.place.qpn
                && attr.av.dgid == self.shared.gid
        });
        let (device, slot) = connected.next()?;
        let is_open = slot.qp.open_to_direct()?.contains(operation.right());
        is_open.then(|| (device, slot.qp.init().pd))
    }

    fn copy(&self, device: &Device, pd: u32, operation: &Direct<'_>) -> Option<()> {
        let (peer, need) = (&device.shared, operation.right());
        let (remote, len) = (operation.remote, operation.len);
        let reach = (pd, operation.dest_qpn.get());
        let hold = if operation.payload_of.is_some() {
            peer.mrs.local(remote.rkey, pd, remote.va, len.into(), need)
        } else {
            peer.mrs.remote(remote.rkey, reach, remote.va, len.into(), need)
        }
        .ok()?;
        let mut bytes = vec![0; len as usize];
        match (operation.direction, operation.local) {
            (Direction::Write, Local::Inline(data)) => bytes.copy_from_slice(data),
            (Direction::Write, Local::Sges(sges)) => {
                let payload = Payload::gather(sges, 0, len as usize, operation.pd);
                payload.copy_to(self.mrs(), self.memory(), &mut bytes).ok()?;
            }
            (Direction::Read, Local::Sges(sges)) => {
                peer.memory.read(hold.addr(), &mut bytes).ok()?;
                let data = Data::Bytes(&bytes);
                return scatter(sges, 0, data, operation.pd, self.mrs(), self.memory()).ok();
            }
            (Direction::Read, Local::Inline(_)) => return None,
        }
        peer.memory.write(hold.addr(), &bytes).ok()
    }
}
