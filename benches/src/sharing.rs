//! `cargo xtask bench --sharing`: the cache lines at which two threads of a process meet that have a queue pair and queues each.
//!
//! Both threads exchange SENDs with a process of their own. Their calls go in single steps, by turns, and each access to memory is
//! noted. A line that one thread writes and the other uses moves between their processors. Lines that only one of them uses, or that both
//! only read, do not. So the result holds for any number of processors and threads, though it is measured with two.

use std::collections::{BTreeMap, BTreeSet};

use iced_x86::{Decoder, DecoderOptions, InstructionInfoFactory, OpAccess, Register};

use crate::messages::{Messages, Observer, Options};
use crate::trace::Step;

/// The cases of `benches/messages.c` in two threads.
const CASES: [(&str, &str); 3] =
    [("send", "exchange SENDs of 2 bytes"), ("write", "WRITE 2 bytes"), ("read", "READ 2 bytes")];

/// Bytes of a cache line.
const LINE: u64 = 64;

/// Threads meet often at a line that more than one call in so many writes in one of them, and uses in the other.
const OFTEN: usize = 8;

/// The uses of a line by a thread.
#[derive(Default)]
struct Use {
    /// Its calls that used it, and those that wrote to it.
    calls: BTreeSet<usize>,
    writing: BTreeSet<usize>,
    /// The instructions that used it.
    places: BTreeSet<u64>,
}

/// The lines of each thread.
struct Lines {
    thread: i32,
    calls: usize,
    threads: BTreeMap<i32, BTreeMap<u64, Use>>,
    factory: InstructionInfoFactory,
}

impl Observer for Lines {
    fn begin(&mut self, _: u64, thread: i32) {
        self.thread = thread;
        self.calls += 1;
    }

    // A poll that finds nothing counts, too: threads that spin would meet there.
    fn again(&mut self) {
        self.calls += 1;
    }

    fn step(&mut self, step: &Step) {
        let ip = step.registers.rip;
        let instruction = Decoder::with_ip(64, &step.code, ip, DecoderOptions::NONE).decode();
        let lines = self.threads.entry(self.thread).or_default();
        for used in self.factory.info(&instruction).used_memory() {
            let writes = match used.access() {
                OpAccess::Read | OpAccess::CondRead => false,
                OpAccess::None | OpAccess::NoMemAccess => continue,
                _ => true,
            };
            let register = |register, _, _| Some(value(&step.registers, register));
            let Some(at) = used.virtual_address(0, register) else { continue };
            let size = used.memory_size().size().max(1) as u64;
            for line in at / LINE..=(at + size - 1) / LINE {
                let of = lines.entry(line).or_default();
                of.calls.insert(self.calls);
                if writes {
                    of.writing.insert(self.calls);
                }
                of.places.insert(ip);
            }
        }
    }

    fn end(&mut self) {}
}

/// The value of a register that an address has: a general one, or a segment's base.
fn value(all: &libc::user_regs_struct, register: Register) -> u64 {
    let whole = match register.full_register() {
        Register::RAX => all.rax,
        Register::RBX => all.rbx,
        Register::RCX => all.rcx,
        Register::RDX => all.rdx,
        Register::RSI => all.rsi,
        Register::RDI => all.rdi,
        Register::RBP => all.rbp,
        Register::RSP => all.rsp,
        Register::R8 => all.r8,
        Register::R9 => all.r9,
        Register::R10 => all.r10,
        Register::R11 => all.r11,
        Register::R12 => all.r12,
        Register::R13 => all.r13,
        Register::R14 => all.r14,
        Register::R15 => all.r15,
        Register::FS => all.fs_base,
        Register::GS => all.gs_base,
        _ => 0,
    };
    if register.size() == 4 { whole & 0xffff_ffff } else { whole }
}

/// Prints the lines that one thread writes and another uses.
pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let messages = options.open()?;
    CASES.iter().try_for_each(|(case, what)| print(&messages, case, what))
}

fn print(messages: &Messages, case: &str, what: &str) -> anyhow::Result<()> {
    let factory = InstructionInfoFactory::new();
    let mut lines = Lines { thread: 0, calls: 0, threads: BTreeMap::new(), factory };
    let symbols = messages.observe(&["threads", case], 1, &mut lines)?;
    let threads: Vec<_> = lines.threads.values().collect();
    let [first, second] = threads[..] else { anyhow::bail!("there are not two threads") };
    let count = |lines: &BTreeMap<u64, Use>, writes| {
        lines.values().filter(|of| of.writing.is_empty() != writes).count()
    };
    println!("Two threads {what}, each on a queue pair of its own; {} calls", lines.calls);
    for (name, lines) in [("one", first), ("the other", second)] {
        println!(
            "  {name} writes {} lines and only reads {}",
            count(lines, true),
            count(lines, false)
        );
    }
    let both = first.iter().filter_map(|(line, one)| Some((line, one, second.get(line)?)));
    let writes = |of: &Use| !of.writing.is_empty();
    let met: Vec<_> = both.filter(|(_, one, other)| writes(one) || writes(other)).collect();
    // Each thread makes half of the calls.
    let is_often = |calls: &BTreeSet<usize>| calls.len() * 2 * OFTEN > lines.calls;
    let meets = |one: &Use, other: &Use| is_often(&one.writing) && is_often(&other.calls);
    let often = met.iter().filter(|(_, one, other)| meets(one, other) || meets(other, one));
    println!("  lines that one writes and the other uses: {}", met.len());
    println!("  of these, in more than one call in {OFTEN}: {}", often.count());
    for (line, one, other) in met {
        println!("  line {:#x}", line * LINE);
        for of in [one, other] {
            let names: BTreeSet<_> = of.places.iter().map(|place| symbols.name(*place)).collect();
            let names: Vec<_> = names.into_iter().collect();
            let (used, written) = (of.calls.len(), of.writing.len());
            println!("    used by {used} calls, written by {written}: {}", names.join(", "));
        }
    }
    Ok(())
}
