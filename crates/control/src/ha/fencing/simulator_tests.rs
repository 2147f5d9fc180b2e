//! Fencing with the real `ipmitool` and a simulated BMC, `ipmi_sim` of OpenIPMI. Skipped, with the
//! reason, where they are not installed.

use std::fs;
use std::net::UdpSocket;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use godwit_ha::Fencing;

use super::tests::devices_of;
use super::{Devices, Fault, Pace, Power};

/// A simulated BMC, whose chassis is a file.
struct Simulator {
    child: Child,
    port: u16,
    folder: tempfile::TempDir,
}

impl Simulator {
    /// Starts one; `None` if a program is missing.
    fn start() -> Option<Simulator> {
        for program in ["ipmitool", "ipmi_sim"] {
            if Command::new(program).arg("-V").output().is_err() {
                println!("skipped: {program} is not installed (Debian: ipmitool, openipmi)");
                return None;
            }
        }
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path();
        let port = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        write_files(place, port);
        let mut command = Command::new("ipmi_sim");
        command.arg("-n").arg("-c").arg(place.join("lan.conf"));
        command.arg("-f").arg(place.join("sim.emu")).arg("-s").arg(place.join("state"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Some(Simulator { child: command.spawn().unwrap(), port, folder })
    }

    fn devices(&self, user: &str) -> Devices {
        devices_of(Path::new("ipmitool"), "127.0.0.1", self.port, user, Pace::QUICK)
    }

    fn power(&self) -> String {
        fs::read_to_string(self.folder.path().join("power")).unwrap()
    }
}

impl Drop for Simulator {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn write_files(place: &Path, port: u16) {
    fs::create_dir(place.join("state")).unwrap();
    fs::write(place.join("power"), "1").unwrap();
    // Called as `chassis ADDRESS get power` or `chassis ADDRESS set power 0`.
    let chassis = format!(
        "shift\ncd {}\ncase \"$1 $2\" in\n'get power') echo \"power:$(cat power)\";;\n\
        'get '*) echo \"$2:default\";;\n'set power') echo \"$3\" >power;;\nesac\n",
        place.display()
    );
    fs::write(place.join("chassis"), chassis).unwrap();
    let auths = "none md2 md5 straight";
    let allowed: String = ["callback", "user", "operator", "admin"]
        .map(|privilege| format!("allowed_auths_{privilege} {auths}\n"))
        .concat();
    let lan = format!(
        "name \"bmc\"\nset_working_mc 0x20\nstartlan 1\naddr 127.0.0.1 {port}\n\
        priv_limit admin\n{allowed}guid a123456789abcdefa123456789abcdef\nendlan\n\
        chassis_control \"sh {}/chassis 0x20\"\n\
        user 1 true \"\" \"\" user 10 {auths}\n\
        user 2 true \"fence\" \"hunter2\" operator 10 {auths}\n\
        user 3 true \"other\" \"another\" operator 10 {auths}\n",
        place.display()
    );
    fs::write(place.join("lan.conf"), lan).unwrap();
    let emulated = "mc_setbmc 0x20\n\
        mc_add 0x20 0 no-device-sdrs 0x23 9 8 0x9f 0x1291 0xf02\nmc_enable 0x20\n";
    fs::write(place.join("sim.emu"), emulated).unwrap();
}

#[tokio::test]
async fn a_simulated_bmc_cuts_the_power() {
    let Some(simulator) = Simulator::start() else { return };
    let devices = simulator.devices("fence");
    let first_answer = async {
        // The simulator may still be starting.
        while let Err(fault) = devices.status("a").await {
            println!("not yet: {fault}");
        }
    };
    tokio::time::timeout(Duration::from_secs(60), first_answer).await.unwrap();
    assert_eq!(devices.status("a").await, Ok(Power::On));
    // This user has another password.
    let answer = simulator.devices("other").status("a").await;
    assert!(matches!(answer, Err(Fault::Refused(_))), "{answer:?}");
    assert_eq!(simulator.power().trim(), "1");
    assert_eq!(devices.cut("a").await, Fencing::Off);
    assert_eq!((devices.fault("a"), simulator.power().trim()), (None, "0"));
}
