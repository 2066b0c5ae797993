//! The calls of librdmacm that are not built.

use crate::refuse::refuse;
use libc::EOPNOTSUPP;

// No socket can exist yet.
refuse! {
    MinusOne(EOPNOTSUPP): raccept rbind rclose rconnect rfcntl rgetpeername rgetsockname rgetsockopt riounmap
        riowrite rlisten rpoll rread rreadv rrecv rrecvfrom rrecvmsg rselect rsend rsendmsg rsendto rsetsockopt
        rshutdown rsocket rwrite rwritev repoll_create repoll_ctl repoll_wait riomap;
}
