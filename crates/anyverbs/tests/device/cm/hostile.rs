//! An attacker on the network that knows every number of a connection of the CM, but has another address than the peer.
//!
//! The peer is played here, on a socket of its own address, so that all the numbers are known.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::os::fd::FromRawFd;
use std::time::Instant;

use anyverbs_proto::cm::id::{CommId, PortSpace as Space, ServiceId};
use anyverbs_proto::cm::ip::IpHeader;
use anyverbs_proto::cm::mad::Mad;
use anyverbs_proto::cm::message::Message;
use anyverbs_proto::cm::message::code::About;
use anyverbs_proto::cm::message::disconnect::{Drep, Dreq};
use anyverbs_proto::cm::message::mra::Mra;
use anyverbs_proto::cm::message::path::PathRecord;
use anyverbs_proto::cm::message::private_data::PrivateData;
use anyverbs_proto::cm::message::rej::Rej;
use anyverbs_proto::cm::message::rep::Rep;
use anyverbs_proto::cm::message::req::Req;
use anyverbs_proto::cm::message::rtu::Rtu;
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wire::deth::Deth;
use anyverbs_proto::wire::icrc::Flow;
use anyverbs_proto::wire::opcode::{Opcode, Operation, Service};
use anyverbs_proto::wire::packet::{Headers, Packet};

use super::*;

const DEVICE: Ipv4Addr = Ipv4Addr::LOCALHOST;
const PEER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
const ATTACKER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 3);
const PEERS_ID: CommId = CommId(0x0000_4444);
const PEERS_QPN: Qpn = Qpn::new(0x333);

fn port() -> u16 {
    std::env::var("ANYVERBS_UDP_PORT").unwrap().parse().unwrap()
}

/// A socket at RoCE's port of one address, beside the device's at all addresses.
fn socket(address: Ipv4Addr) -> UdpSocket {
    // SAFETY: a new descriptor, which is ours.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    assert!(fd >= 0);
    let one = 1i32;
    let name = libc::sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: port().to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from(address).to_be() },
        sin_zero: [0; 8],
    };
    // SAFETY: the kernel reads an integer and a name, both of the length that is said; `fd` is owned once it is returned.
    unsafe {
        let reuse = libc::setsockopt(
            fd,
            libc::SOL_SOCKET,
            libc::SO_REUSEPORT,
            (&raw const one).cast(),
            size_of_val(&one) as u32,
        );
        assert_eq!(reuse, 0);
        let bound = libc::bind(fd, (&raw const name).cast(), size_of_val(&name) as u32);
        assert_eq!(bound, 0, "{}", std::io::Error::last_os_error());
        let socket = UdpSocket::from_raw_fd(fd);
        socket.set_read_timeout(Some(SECOND * 10)).unwrap();
        socket
    }
}

/// Sends a message of the CM to the device's QP1, as its driver would.
fn send(socket: &UdpSocket, message: impl Into<Message>) {
    let mad = Mad { transaction_id: 7, modifier: 0, message: message.into() }.emit();
    let opcode = Opcode::new(Service::Ud, Operation::SendOnly);
    let mut headers = Headers::new(Bth::new(opcode, Qpn::GSI, Psn::new(1)));
    headers.deth = Some(Deth { qkey: QKey::GSI, src_qpn: Qpn::GSI });
    let packet = Packet::new(headers, &mad);
    let mut bytes = vec![0; packet.len()];
    packet.emit(&mut bytes);
    let from = socket.local_addr().unwrap();
    let flow = Flow::new(from.ip(), IpAddr::V4(DEVICE), from.port(), port());
    bytes.extend(flow.compute(0, &bytes).to_le_bytes());
    socket.send_to(&bytes, (DEVICE, port())).unwrap();
}

/// The next message that the device sends to this socket.
fn receive(socket: &UdpSocket) -> Message {
    let mut bytes = [0; 4096];
    let len = socket.recv(&mut bytes).unwrap();
    let packet = Packet::parse(&bytes[..len - 4]).unwrap();
    assert_eq!(packet.headers.bth.dest_qpn, Qpn::GSI);
    Mad::parse(packet.payload).unwrap().message
}

fn request(listener: &Node) -> Req {
    let header = IpHeader { source: (PEER, 9).into(), destination: DEVICE.into() };
    let path = PathRecord {
        local_gid: Gid::from(IpAddr::V4(PEER)),
        remote_gid: Gid::from(IpAddr::V4(DEVICE)),
        ..PathRecord::default()
    };
    Req {
        local_comm_id: PEERS_ID,
        service_id: ServiceId::of_port(Space::Tcp, listener.port()),
        local_qpn: PEERS_QPN,
        pkey: PKey::DEFAULT,
        path_mtu: Some(Mtu::Mtu1024),
        remote_response_timeout: 20,
        local_response_timeout: 20,
        max_cm_retries: 15,
        primary: path,
        private_data: PrivateData::new(&header.emit()).unwrap(),
        ..Req::default()
    }
}

/// All that could end or move the connection, with its right numbers.
fn attacks(remote_comm_id: CommId, remote_qpn: Qpn) -> Vec<Message> {
    let local_comm_id = PEERS_ID;
    let mut attacks: Vec<Message> = vec![
        Dreq { local_comm_id, remote_comm_id, remote_qpn, ..Dreq::default() }.into(),
        Drep { local_comm_id, remote_comm_id, ..Drep::default() }.into(),
        Rep { local_comm_id, remote_comm_id, local_qpn: PEERS_QPN, ..Rep::default() }.into(),
        Rtu { local_comm_id, remote_comm_id, ..Rtu::default() }.into(),
    ];
    for about in [About::Req, About::Rep, About::No] {
        attacks.push(Rej { local_comm_id, remote_comm_id, about, ..Rej::default() }.into());
        attacks.push(Rej { local_comm_id, about, ..Rej::default() }.into());
        attacks.push(Mra { local_comm_id, remote_comm_id, about, ..Mra::default() }.into());
    }
    attacks
}

/// Waits until the device has answered a message that it got after all others on this socket. It is a DREQ with unknown
/// IDs, which is answered by a DREP with the same.
fn wait_until_read(socket: &UdpSocket, remote_comm_id: CommId) {
    let nobodys = CommId(remote_comm_id.0 ^ 1);
    send(socket, Dreq { local_comm_id: CommId(9), remote_comm_id: nobodys, ..Dreq::default() });
    let begin = Instant::now();
    loop {
        if let Message::Drep(drep) = receive(socket)
            && drep.remote_comm_id == CommId(9)
        {
            return;
        }
        assert!(begin.elapsed() < SECOND * 60, "the device does not answer");
    }
}

#[test]
fn an_attacker_of_another_address_ends_no_connection() {
    let listener = Node::listener(&at("127.0.0.1", 0));
    let (peer, attacker) = (socket(PEER), socket(ATTACKER));
    send(&peer, request(&listener));
    let (mut passive, _) = listener.request();
    passive.attach(QpType::Rc);
    passive.id.accept(Some(&PARAM)).unwrap();
    let Message::Rep(rep) = receive(&peer) else { panic!("no REP") };
    assert_eq!(rep.remote_comm_id, PEERS_ID);
    let (id, qpn) = (rep.local_comm_id, rep.local_qpn);

    let attack = || {
        for message in attacks(id, qpn) {
            send(&attacker, message);
        }
        wait_until_read(&attacker, id);
        stays_quiet(&passive.channel);
        assert_eq!(passive.e().qp.state().unwrap(), QpState::Rts);
    };
    // While the device waits for the RTU, and when the connection stands.
    attack();
    send(&peer, Rtu { local_comm_id: PEERS_ID, remote_comm_id: id, ..Rtu::default() });
    passive.expect(EventKind::Established);
    attack();

    // The same message from the peer's address ends it, so the attempts above would have worked.
    let remote_qpn = qpn;
    let dreq = Dreq { local_comm_id: PEERS_ID, remote_comm_id: id, remote_qpn, ..Dreq::default() };
    send(&peer, dreq);
    passive.expect(EventKind::Disconnected);
    passive.id.disconnect().unwrap();
}
