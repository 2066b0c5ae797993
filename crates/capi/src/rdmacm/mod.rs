//! librdmacm: the connection manager and rsockets.

mod strings;

use crate::refuse::refuse;
use libc::EOPNOTSUPP;

pub(crate) use strings::*;

// No id, channel or socket can exist yet, so there is nothing that the calls without a result could destroy.
refuse! {
    Null(EOPNOTSUPP): rdma_create_event_channel rdma_get_devices;
    MinusOne(EOPNOTSUPP): rdma_accept rdma_ack_cm_event rdma_bind_addr rdma_connect rdma_create_ep
        rdma_create_id rdma_create_qp rdma_create_qp_ex rdma_create_srq rdma_create_srq_ex rdma_destroy_id
        rdma_disconnect rdma_get_cm_event rdma_get_request rdma_getaddrinfo rdma_join_multicast
        rdma_leave_multicast rdma_listen rdma_migrate_id rdma_notify rdma_reject rdma_resolve_addr
        rdma_resolve_route rdma_set_option rdma_join_multicast_ex rdma_establish rdma_init_qp_attr
        rdma_get_remote_ece rdma_reject_ece rdma_set_local_ece rdma_query_addrinfo rdma_resolve_addrinfo
        rdma_write_cm_event;
    MinusOne(EOPNOTSUPP): raccept rbind rclose rconnect rfcntl rgetpeername rgetsockname rgetsockopt riounmap
        riowrite rlisten rpoll rread rreadv rrecv rrecvfrom rrecvmsg rselect rsend rsendmsg rsendto rsetsockopt
        rshutdown rsocket rwrite rwritev repoll_create repoll_ctl repoll_wait riomap;
    Void(0): rdma_destroy_ep rdma_destroy_event_channel rdma_destroy_qp rdma_destroy_srq rdma_free_devices
        rdma_freeaddrinfo;
    No(0): rdma_get_dst_port rdma_get_src_port;
}
