//! A directory with the files for a VM of these tests.

use std::path::{Path, PathBuf};
use std::time::Duration;

use godwit_qemu::{
    Accel, AccelProbe, Accelerator, ByteSize, CONSOLE_LOG, Disk, DiskFormat, Launch, MemoryBlock,
    OpenFiles, QemuInfo, QemuProcess, ResolvedSpec, StartError, VmSpec, inspect, is_alive,
};
use parking_lot::Mutex;
use tempfile::TempDir;

/// Longest wait on a busy machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// Boot sector in real mode: counts a double word at 0x8000 and writes a dot to the first serial
/// port every 2^20 counts.
///
/// ```text
/// cli; xor ax,ax; mov ds,ax; mov sp,0x7c00
/// 1: inc dword [0x8000]; test dword [0x8000],0xfffff; jnz 1b
///    mov dx,0x3f8; mov al,'.'; out dx,al; jmp 1b
/// ```
const BOOT_SECTOR: [u8; 32] = [
    0xfa, 0x31, 0xc0, 0x8e, 0xd8, 0xbc, 0x00, 0x7c, 0x66, 0xff, 0x06, 0x00, 0x80, 0x66, 0xf7, 0x06,
    0x00, 0x80, 0xff, 0xff, 0x0f, 0x00, 0x75, 0xf0, 0xba, 0xf8, 0x03, 0xb0, 0x2e, 0xee, 0xeb, 0xe8,
];

pub(crate) struct Bench {
    pub(crate) qemu: QemuInfo,
    /// Started processes, so that a failed test leaves no QEMU behind.
    started: Mutex<Vec<(i32, u64)>>,
    folder: TempDir,
}

impl Drop for Bench {
    fn drop(&mut self) {
        for &(pid, start_time) in self.started.lock().iter() {
            if is_alive(pid, start_time)
                && let Some(pid) = rustix::process::Pid::from_raw(pid)
            {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
    }
}

impl Bench {
    /// Returns `None`, with the reason printed, where no QEMU is installed.
    pub(crate) async fn new() -> Option<Bench> {
        match inspect("qemu-system-x86_64", None).await {
            Ok(qemu) => Some(Bench {
                qemu,
                started: Mutex::default(),
                folder: tempfile::tempdir().unwrap(),
            }),
            Err(error) => {
                eprintln!("skipped: {}", error.fault());
                None
            }
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn disk(&self) -> PathBuf {
        let path = self.path("disk.img");
        let mut image = vec![0; 1 << 20];
        image[..BOOT_SECTOR.len()].copy_from_slice(&BOOT_SECTOR);
        image[510..512].copy_from_slice(&[0x55, 0xaa]);
        std::fs::write(&path, image).unwrap();
        path
    }

    pub(crate) fn spec(&self, change: impl FnOnce(&mut VmSpec)) -> ResolvedSpec {
        let mut spec = VmSpec::new("test");
        spec.memory = vec![MemoryBlock::shared(ByteSize::from_mib(32))];
        spec.accel = Accel::Tcg;
        spec.disks = vec![Disk::new(self.path("disk.img"), DiskFormat::Raw)];
        change(&mut spec);
        let spec =
            spec.resolve(&self.qemu, &AccelProbe { kvm: false, reason: String::new() }).unwrap();
        assert_eq!(spec.accel, Accelerator::Tcg);
        spec
    }

    /// Returns a launch with its own run directory and memory files.
    pub(crate) fn launch(&self, side: &str, spec: &ResolvedSpec) -> Launch {
        let run_dir = self.path(side);
        std::fs::create_dir_all(&run_dir).unwrap();
        let ram_files: Vec<PathBuf> =
            (0..spec.memory.len()).map(|index| self.path(&format!("{side}.{index}.ram"))).collect();
        for (path, block) in ram_files.iter().zip(&spec.memory) {
            std::fs::File::create(path).unwrap().set_len(block.size.bytes()).unwrap();
        }
        Launch {
            spec: spec.clone(),
            qemu: self.qemu.path.clone(),
            run_dir,
            ram_files,
            files: OpenFiles::default(),
            taps: Vec::new(),
            tpm: None,
            tracker: None,
            user: None,
            sandbox: true,
            limits: Default::default(),
            incoming: false,
            paused: true,
        }
    }

    pub(crate) async fn start(
        &self,
        side: &str,
        spec: &ResolvedSpec,
    ) -> Result<QemuProcess, StartError> {
        self.begin(self.launch(side, spec)).await
    }

    pub(crate) async fn begin(&self, mut launch: Launch) -> Result<QemuProcess, StartError> {
        launch.files = OpenFiles::open(&launch.spec, &|_| true).unwrap();
        let process = launch.start().await?;
        self.started.lock().push((process.pid, process.start_time));
        Ok(process)
    }
}

/// Waits until the guest has written more than `already` bytes; returns how many.
pub(crate) async fn written(run_dir: &Path, already: u64) -> u64 {
    let deadline = tokio::time::Instant::now() + LIMIT;
    let mut look = tokio::time::interval(Duration::from_millis(5));
    loop {
        look.tick().await;
        let bytes =
            std::fs::metadata(run_dir.join(CONSOLE_LOG)).map_or(0, |metadata| metadata.len());
        if bytes > already {
            return bytes;
        }
        assert!(tokio::time::Instant::now() < deadline, "the guest writes nothing");
    }
}
