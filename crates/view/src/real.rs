//! libc's own functions behind the ones that this object defines.

anyverbs_interpose::reals! {
    open open64 openat openat64 __open_2 __open64_2 __openat_2 __openat64_2 creat creat64
    fopen fopen64 freopen freopen64
    opendir scandir scandir64 scandirat scandirat64 glob glob64
    stat stat64 lstat lstat64 fstatat fstatat64 statx
    __xstat __xstat64 __lxstat __lxstat64 __fxstatat __fxstatat64
    statfs statfs64 statvfs statvfs64
    access eaccess euidaccess faccessat
    readlink readlinkat __readlink_chk __readlinkat_chk
    realpath __realpath_chk canonicalize_file_name
    chdir getcwd __getcwd_chk get_current_dir_name
    getxattr lgetxattr listxattr llistxattr
    socket bind getsockname send sendto sendmsg recv recvfrom recvmsg
}
