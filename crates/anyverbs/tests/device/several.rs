//! Several devices of one process.

use anyverbs::error::{CreateError, RegisterError};
use anyverbs::raw::{ReceiveFlags, WqInit};
use anyverbs::*;
use anyverbs_testing::in_own_process;

use crate::cm::{Node, at};
use crate::endpoint::*;

/// Runs a test of this module in a process with three devices.
fn with_three(name: &str, test: impl FnOnce()) {
    three_devices(&format!("several::{name}"), &[], test);
}

/// Runs the test called `name` in a process with three devices, and these variables.
pub(crate) fn three_devices(name: &str, variables: &[(&str, &str)], test: impl FnOnce()) {
    in_own_process(name, || {
        let three = [("ANYVERBS_DEVICES", "3"), ("ANYVERBS_INTERFACES", "")];
        for (variable, value) in three.iter().chain(variables) {
            // SAFETY: before the device is opened, and by the only thread that runs a test.
            unsafe { std::env::set_var(variable, value) };
        }
        isolate();
        test();
    });
}

pub(crate) fn open(number: usize) -> Context {
    Context::open(&devices().unwrap()[number].name).unwrap()
}

#[test]
fn each_device_has_a_name_a_guid_and_an_address() {
    with_three("each_device_has_a_name_a_guid_and_an_address", || {
        let listed = devices().unwrap();
        let names: Vec<_> = listed.iter().map(|device| device.name.as_str()).collect();
        assert_eq!(names, ["anyverbs0", "anyverbs1", "anyverbs2"]);
        for (number, device) in listed.iter().enumerate() {
            let context = open(number);
            assert_eq!(context.number(), number);
            assert_eq!(context.device_attr().unwrap().node_guid, device.node_guid);
            let gids = context.gids().unwrap();
            let ip = format!("127.0.0.{}", number + 1);
            assert_eq!(gids.len(), 1);
            assert_eq!((gids[0].index, gids[0].gid.to_ip()), (0, ip.parse().unwrap()));
            assert_eq!(context.port_attr(1).unwrap().state, PortState::Active);
            let again = Context::import(context.command_fd().try_clone_to_owned().unwrap());
            assert_eq!(again.unwrap().number(), number);
        }
        let different = |guid: fn(&DeviceInfo) -> u64| {
            listed.iter().map(guid).collect::<std::collections::HashSet<_>>().len()
        };
        assert_eq!(different(|device| device.node_guid), 3);
        assert_eq!(different(|device| device.sys_image_guid), 3);
        assert!(Context::open("anyverbs3").is_err());
    });
}

#[test]
fn a_device_refuses_the_objects_of_another() {
    with_three("a_device_refuses_the_objects_of_another", || {
        let [one, other] = [0, 1].map(|number| Endpoint::on(open(number), QpType::Rc));
        let init = |cq| QpInitAttr {
            qp_type: QpType::Rc,
            send_cq: cq,
            recv_cq: cq,
            srq: None,
            cap: CAP,
            sq_sig_all: false,
            cookie: 0,
        };
        let refused = one.context.create_qp(&one.pd, &init(&other.cq)).unwrap_err();
        assert!(matches!(refused, CreateError::Foreign("completion queue")), "{refused}");
        let srq = SrqInitAttr { max_wr: 4, max_sge: 1, ..SrqInitAttr::default() };
        let srq = other.pd.create_srq(&srq).unwrap();
        let with_srq = QpInitAttr { srq: Some(&srq), ..init(&one.cq) };
        let refused = one.context.create_qp(&one.pd, &with_srq).unwrap_err();
        assert!(matches!(refused, CreateError::Foreign("SRQ")), "{refused}");
        // A key of the other device is none of this one.
        one.connect(other.address());
        other.connect(one.address());
        let (mine, theirs) = (Buffer::new(&one.pd, 64), Buffer::new(&other.pd, 64));
        one.send(1, SendOp::Write(theirs.remote(0)), &[theirs.sge(0, 8)]);
        assert_eq!(one.poll(1)[0].status, WcStatus::LocProtErr);
        drop(mine);
    });
}

#[test]
fn a_change_or_a_part_of_another_device_is_refused() {
    with_three("a_change_or_a_part_of_another_device_is_refused", || {
        let [one, other] = [0, 1].map(|number| Endpoint::on(open(number), QpType::Rc));
        let init = |channel, pd| CqInitAttr { channel, pd, ..CqInitAttr::new(1) };
        let channel = init(Some(&other.channel), None);
        let refused = one.context.create_cq_ex(&channel).unwrap_err();
        assert!(matches!(refused, CreateError::Foreign("completion channel")), "{refused}");
        let parent = other.pd.parent_domain(None, QueueMemory::HEAP).unwrap();
        let refused = one.context.create_cq_ex(&init(None, Some(&parent))).unwrap_err();
        assert!(matches!(refused, CreateError::Foreign("parent domain")), "{refused}");
        let region = Buffer::new(&one.pd, 64);
        let rereg = Rereg { pd: Some(&other.pd), ..Rereg::default() };
        // SAFETY: the memory stays.
        let refused = unsafe { region.mr.rereg(&rereg) }.unwrap_err();
        assert!(matches!(refused, RegisterError::Foreign("protection domain")), "{refused}");
        let dm = other.context.alloc_dm(64, 0).unwrap();
        let refused = one.pd.reg_dm_mr(&dm, 0, 64, Access::ZERO_BASED).unwrap_err();
        assert!(matches!(refused, RegisterError::Foreign("device memory")), "{refused}");
        let domain = other.context.open_xrcd(XrcdInitAttr::default()).unwrap();
        let srq = SrqInitAttr { max_wr: 4, max_sge: 1, ..SrqInitAttr::default() };
        let refused = domain.create_srq(&one.pd, &one.cq, &srq).unwrap_err();
        assert!(matches!(refused, CreateError::Foreign("XRC domain")), "{refused}");
        let wq = WqInit {
            cq: &other.cq,
            max_wr: 4,
            max_sge: 1,
            flags: ReceiveFlags::default(),
            cookie: 0,
        };
        let wq = other.context.create_wq(&other.pd, &wq).unwrap();
        let refused = one.context.create_rwq_ind_table(&[&wq]).unwrap_err();
        assert!(matches!(refused, CreateError::Foreign("work queue")), "{refused}");
        // An address of the other device.
        one.to_init();
        let attr =
            QpAttr { state: QpState::Rtr, av: other.av(other.address()), ..QpAttr::default() };
        let mask = QpAttrMask::STATE
            | QpAttrMask::AV
            | QpAttrMask::PATH_MTU
            | QpAttrMask::DEST_QPN
            | QpAttrMask::RQ_PSN
            | QpAttrMask::MAX_DEST_RD_ATOMIC
            | QpAttrMask::MIN_RNR_TIMER;
        let refused = one.qp.modify(&attr, mask).unwrap_err();
        assert!(refused.to_string().contains("GID index"), "{refused}");
    });
}

#[test]
fn queue_pairs_of_two_devices_talk() {
    with_three("queue_pairs_of_two_devices_talk", || {
        let [a, b] = [0, 2].map(|number| Endpoint::on(open(number), QpType::Rc));
        a.connect(b.address());
        b.connect(a.address());
        let (src, dst) = (Buffer::new(&a.pd, 64), Buffer::new(&b.pd, 64));
        src.write(0, b"rails");
        a.send(1, SendOp::Write(dst.remote(8)), &[src.sge(0, 5)]);
        assert_eq!(a.poll(1)[0].status, WcStatus::Success);
        assert_eq!(dst.read(8, 5), b"rails");
        // An index of the GID table is one of the device's own.
        let attr = AhAttr { dgid: b.address().gid, is_global: true, port: 1, ..AhAttr::default() };
        assert_eq!(b.context.resolve(&attr).unwrap().sgid, b.address().gid);
        assert_eq!(a.context.resolve(&attr).unwrap().sgid, a.address().gid);
        assert!(a.context.resolve(&AhAttr { sgid_index: 1, ..attr }).is_err());
    });
}

#[test]
fn an_id_is_bound_to_the_device_of_its_address() {
    with_three("an_id_is_bound_to_the_device_of_its_address", || {
        for number in 0..3 {
            let node = Node::tcp();
            node.id.bind_addr(&at(&format!("127.0.0.{}", number + 1), 0)).unwrap();
            assert_eq!(node.id.info().device, Some(number));
        }
        let node = Node::tcp();
        // An address of the host, and of no device.
        let refused = node.id.bind_addr(&at("127.0.0.9", 0)).unwrap_err();
        assert_eq!(refused.errno(), libc::ENODEV, "{refused}");
    });
}

#[test]
fn each_device_may_have_a_persona_of_its_own() {
    in_own_process("several::each_device_may_have_a_persona_of_its_own", || {
        let file = std::env::temp_dir().join(format!("anyverbs-rack-{}.toml", std::process::id()));
        let devices = "[{ persona = 'mlx5' }, { persona = 'irdma' }, { name = 'plain' }]";
        std::fs::write(&file, format!("devices = {devices}")).unwrap();
        // SAFETY: before the device is opened, and by the only thread that runs a test.
        unsafe {
            std::env::set_var("ANYVERBS_CONFIG", &file);
            std::env::set_var("ANYVERBS_INTERFACES", "");
        }
        isolate();
        // They are known before one is opened.
        let listed = anyverbs::devices().unwrap();
        let personas: Vec<_> =
            listed.iter().map(|d| d.persona.as_ref().map_or("", |p| &*p.name)).collect();
        let names: Vec<_> = listed.iter().map(|device| device.name.as_str()).collect();
        assert_eq!(names, ["mlx5_0", "irdma1", "plain"]);
        assert_eq!(personas, ["mlx5", "irdma", ""]);
        let contexts = [0, 1, 2].map(open);
        std::fs::remove_file(file).unwrap();
        let attrs = contexts.each_ref().map(|context| context.device_attr().unwrap());
        assert_eq!(attrs.map(|attr| attr.vendor_id), [0x02c9, 0x8086, 0xa17b]);
        for (attr, device) in attrs.iter().zip(&listed) {
            assert_eq!(
                (attr.node_guid, attr.sys_image_guid),
                (device.node_guid, device.sys_image_guid)
            );
        }
        let tables = contexts.each_ref().map(|c| c.gids().unwrap().last().unwrap().index);
        assert_eq!(tables, [3, 1, 0]);
        // Each refuses what it lacks, and what is above its limits.
        let pds = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
        let srq = SrqInitAttr { max_wr: 4, max_sge: 1, ..SrqInitAttr::default() };
        let made = pds.each_ref().map(|pd| pd.create_srq(&srq).map_err(|e| e.to_string()).err());
        let lacks = "persona irdma: it lacks shared receive queues (SRQ)";
        assert!(made[0].is_none() && made[2].is_none());
        assert!(made[1].as_ref().is_some_and(|why| why.contains(lacks)), "{made:?}");
        let most = attrs.map(|attr| attr.max_sge);
        assert!(most[1] < most[0] && most[0] < most[2], "{most:?}");
        for ((context, pd), sges) in contexts.iter().zip(&pds).zip(most) {
            let cq = context.create_cq(16, None, 0, 0).unwrap();
            let make = |max_send_sge| {
                let cap = QpCap { max_send_sge, max_inline_data: 0, ..CAP };
                let (qp_type, sq_sig_all, srq) = (QpType::Rc, false, None);
                let (send_cq, recv_cq) = (&cq, &cq);
                let init =
                    QpInitAttr { send_cq, recv_cq, srq, cap, qp_type, sq_sig_all, cookie: 0 };
                context.create_qp(pd, &init).map(drop)
            };
            assert_eq!(make(sges), Ok(()));
            let beyond = make(sges + 1);
            let is_limit =
                matches!(beyond, Err(CreateError::Limit { .. } | CreateError::PersonaLimit { .. }));
            assert!(is_limit, "{beyond:?}");
            let max_cqe = context.device_attr().unwrap().max_cqe;
            assert!(cq.resize(max_cqe + 1).is_err(), "{max_cqe}");
        }
    });
}
